"""Fill the tables and quotations in the documentation from the code: python docs/generate.py [--check].

A block between `<!-- begin NAME -->` and `<!-- end NAME -->` belongs to this script.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "docs/architecture.md",
    "docs/operators.md",
    "docs/audit.md",
    "docs/versions.md",
    "docs/checkpoints.md",
    "docs/features.md",
)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def options() -> str:
    from vllm_backplane.device import discover
    from vllm_backplane.runtime import OPTIONS
    from vllm_backplane.settings.options import OTHER_VARIABLES

    def row(scope: str, option) -> tuple[str, ...]:  # type: ignore[no-untyped-def]
        key = f"{scope}.{option.key}" if scope else option.key
        shown = "none" if option.default in (None, ()) else f"`{option.default}`"
        return f"`{key}`", f"`{option.variable(scope)}`", shown, option.help

    # A device of another distribution may be installed here; it documents itself.
    shipped = {name: entry for name, entry in discover().items() if entry.source == "vllm-backplane"}
    rows = [row("", option) for option in OPTIONS]
    rows += [row(name, option) for name, entry in sorted(shipped.items()) for option in entry.options()]
    rows += [("", f"`{name}`", "none", text[0].upper() + text[1:] + ".") for name, text in OTHER_VARIABLES.items()]
    return table(("key", "variable", "default", "meaning"), rows)


def bindings() -> str:
    from vllm_backplane.binding.registry import BINDINGS

    return table(
        ("vLLM's layer", "replacement", "operators", "why"),
        (
            (
                f"`{b.layer}`",
                f"`{b.replacement.removeprefix('vllm_backplane.')}`",
                ", ".join(f"`{o}`" for o in b.operators),
                b.reason,
            )
            for b in BINDINGS
        ),
    )


def gguf_types() -> str:
    from vllm_backplane.gguf.blocks import FLOATS, LAYOUTS
    from vllm_backplane.gguf.file import Tensor
    from vllm_backplane.gguf.packing import bytes_in_memory, torch

    def bits(kind) -> float:  # type: ignore[no-untyped-def]
        return bytes_in_memory(Tensor("", kind, (1, 256), 0, 0), torch.float32) * 8 / 256

    def in_file(kind) -> float:  # type: ignore[no-untyped-def]
        return Tensor("", kind, (1, 256), 0, 0).row_bytes * 8 / 256

    rows = [
        (kind.name, f"{in_file(kind):g}", f"{bits(kind):g}", f"{layout.bits} bits in groups of {layout.group}", "none")
        for kind, layout in LAYOUTS.items()
    ]
    rows += [(kind.name, f"{in_file(kind):g}", "as `--dtype`", "values", "to `--dtype`") for kind in FLOATS]
    return table(("type", "bits per weight in the file", "in memory", "as", "rounding of weights"), rows)


def _measured(found: dict[str, Any]) -> str:
    return f"{found['date']}, {found['commit']}, {found['machine'] or 'machine not noted'}"


def default_model_perplexity() -> str:
    rows = json.loads((ROOT / "benchmarks" / "results" / "perplexity.json").read_text())["rows"]
    file, exact = (rows[name]["perplexity"] for name in ("gguf", "float32"))
    return (
        "Perplexity of the default model's file (Q4_1, the embedding Q8_0) on the text of\n"
        f"[quantization.md](quantization.md): {file:.3f}, against {exact:.3f} for its weights expanded to float32:\n"
        f"{100 * (file / exact - 1):+.2f} % (`python benchmarks/perplexity.py float32 gguf`, on a Neoverse-N1)."
    )


def gguf_perplexity() -> str:
    known = json.loads((ROOT / "benchmarks" / "results" / "gguf-perplexity.json").read_text())
    exact = known["formats"]["F32"]["ours"]  # without it nothing can be compared: measure it first

    def row(name: str, found: dict[str, Any]) -> tuple[str, ...]:
        own, peer = found["ours"], found["llama.cpp"]
        change = f"{100 * (own / exact - 1):+.2f} %"
        types = ", ".join(found["types"])
        return name, types, found["dtype"], f"{own:.3f}", change, f"{peer:.3f}", f"{own / peer:.4f}"

    header = ("file", "types of its matrices", "`--dtype`", "ours", "against F32", "llama.cpp", "ours / llama.cpp")
    runs: dict[str, list[str]] = {}
    for name, found in known["formats"].items():
        run = _measured(found)
        if peer := found.get("llama.cpp measured"):
            run += f"; llama.cpp: {_measured(peer)}"
        runs.setdefault(run, []).append(name)
    told = "; ".join(f"{', '.join(names)} ({run})" for run, names in runs.items())
    return f"{table(header, (row(*one) for one in known['formats'].items()))}\n\nMeasured: {told}."


def gguf_speed() -> str:
    sys.path.insert(0, str(ROOT))
    from benchmarks.compare.by_format import digest

    return digest(ROOT / "benchmarks" / "results")


def gguf_architectures() -> str:
    from vllm_backplane.gguf.architectures import ARCHITECTURES, MIXTRAL

    rows = [(f"`{name}`", f"`{one.model_class}`") for name, one in ARCHITECTURES.items()]
    rows.insert(1, ("`llama` with experts", f"`{MIXTRAL.model_class}`"))
    return table(("general.architecture", "served by vLLM's"), rows)


def operators() -> str:
    from vllm_backplane import ops  # noqa: F401  # declares them
    from vllm_backplane.ops.operator import declared

    ordered = sorted(declared().values(), key=lambda o: (o.family, o.name))
    return table(("family", "operator", "what it computes"), ((o.family, f"`{o.name}`", o.summary) for o in ordered))


def minimal_device() -> str:
    return "```python\n" + (ROOT / "examples/minimal_device/minimal_device.py").read_text().rstrip() + "\n```"


def audit_rules() -> str:
    from vllm_patchbay.audit import RULES

    return "\n\n".join(
        f"### `{rule.id}` {rule.name}\n\n{rule.summary} {rule.explanation}\n\n"
        f"Severity: {rule.severity.word}. Remedy: {rule.remedy}."
        for rule in RULES.values()
    )


def audit_corpus() -> str:
    import runpy

    cases = runpy.run_path(str(ROOT / "tests/unit/patchbay/audit/audit_cases.py"))["read_cases"]()
    labels = sum(case.expected.total() for case in cases)
    harmless = sum(not case.expected for case in cases)
    return (
        f"The corpus has {len(cases)} small plugins with {labels} expected findings; {harmless} of the plugins look "
        "dangerous and have none."
    )


def features() -> str:
    import runpy

    matrix = runpy.run_path(str(ROOT / "tests/feature_matrix.py"))
    rows, nowhere, seen_on = matrix["page"](matrix["read"](matrix["RECORD"]))
    shown = table(("feature", *matrix["DEVICES"]), rows)
    missing = "\n".join(f"- {feature}" for feature in nowhere) or "None."
    versions = ", ".join(seen_on) or "none yet"
    return f"Seen on vLLM: {versions}.\n\n{shown}\n\nNo test shows these on any device yet:\n\n{missing}"


def formats() -> str:
    import runpy

    matrix = runpy.run_path(str(ROOT / "tests/feature_matrix.py"))
    rows, _, _ = matrix["page"](matrix["read"](matrix["RECORD"]), (*matrix["DEVICES"], matrix["REFERENCES"]))
    kept = [(row[0].removeprefix("Format: "), *row[1:]) for row in rows if row[0].startswith("Format: ")]
    return table(("format", *matrix["DEVICES"], "any device, by references"), kept)


def releases() -> str:
    from vllm_backplane.settings.releases import RELEASES

    return table(("vLLM", "torch", "what is run on it"), ((r.version, r.torch, r.covered) for r in RELEASES))


def partly_there() -> str:
    from vllm_backplane.settings.compat import PARTLY_THERE

    return table(("of vLLM", "without it"), ((f"`{path}`", why) for path, why in PARTLY_THERE.items()))


def benchmarks() -> str:
    sys.path.insert(0, str(ROOT))
    from benchmarks.compare.digest import digest

    return digest(ROOT / "benchmarks" / "results")


BLOCKS: dict[str, Callable[[], str]] = {
    "options": options,
    "bindings": bindings,
    "operators": operators,
    "minimal device": minimal_device,
    "audit rules": audit_rules,
    "audit corpus": audit_corpus,
    "features": features,
    "formats": formats,
    "releases": releases,
    "gguf types": gguf_types,
    "default model perplexity": default_model_perplexity,
    "gguf perplexity": gguf_perplexity,
    "gguf speed": gguf_speed,
    "gguf architectures": gguf_architectures,
    "partly there": partly_there,
    "benchmarks": benchmarks,
}


def filled(text: str) -> str:
    def fill(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- begin {name} -->\n{BLOCKS[name]()}\n<!-- end {name} -->"

    return re.sub(r"<!-- begin ([a-z ]+) -->\n.*?<!-- end \1 -->", fill, text, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is stale")
    check = parser.parse_args().check
    stale = []
    for page in PAGES:
        path = ROOT / page
        old = path.read_text()
        new = filled(old)
        if new != old:
            stale.append(page)
            if not check:
                path.write_text(new)
    for page in stale:
        print(f"{page}: {'stale; run python docs/generate.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
