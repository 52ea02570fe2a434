"""A new patch and its two tests, with everything filled in that can be read off vLLM."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.version import Version

from vllm_backplane.errors import PatchError
from vllm_backplane.patch.verification import take_fingerprint
from vllm_backplane.upstream import SymbolIndex

_PATCH = '''"""{target}: in one line, what is wrong with it here."""

from __future__ import annotations

from vllm_backplane.patch import Patch, Process


@Patch(
    target="{target}",
    process=Process.{process},
    versions=">={low},<{high}",
    why="",
    how="",
    upstream="",
    remove_when="",
    fingerprints={{
        "{version}": (
{fingerprint}
        ),
    }},
)
def {name}({parameters}):  # type: ignore[no-untyped-def]
    return {name}.original({arguments})
'''

_UNIT = '''"""The patch {name}, by itself."""

from __future__ import annotations

from {package}.{process}.patch_{module} import {name}
from vllm_backplane.patch import Outcome, verify
from vllm_backplane.upstream import SymbolIndex, installed_tree


def test_it_fits_the_installed_vllm() -> None:
    tree = installed_tree()
    assert verify({name}, SymbolIndex(tree), tree.version).outcome is Outcome.FITS


def test_it_does_what_it_is_for() -> None:
    raise AssertionError("write what {name} changes, as a comparison with what vLLM does without it")
'''

_E2E = '''"""The patch {name}, in a running engine."""

from __future__ import annotations


def test_the_engine_behaves_as_the_patch_intends() -> None:
    raise AssertionError("start an engine that needs {name} and show that it does what it should")
'''


def write(target: str, process: str, index: SymbolIndex, version: str, root: Path, package: str) -> list[Path]:
    """Write three files; refuse to overwrite one. The tests fail until they are written."""
    module, _, qualified = target.partition(":")
    if not qualified:
        raise PatchError(f"{target!r} names a module only; add what to patch in it: {target}:NAME")
    found = index.resolve(module, qualified)
    if not found.is_found:
        raise PatchError(f"{target} does not exist in vLLM {version} ({found.reason})")
    if "." in qualified and found.qualname != qualified:
        raise PatchError(f"{target} is inherited from {found.path}; patch it there")
    source = index.normalised_source_of(found.module, found.qualname)
    stem = module.rpartition(".")[2]
    name = re.sub(r"\W|(?<=[a-z])(?=[A-Z])", "_", qualified).lower()
    parameters, arguments = _parameters(source)
    release = Version(version)
    values = {
        "target": target,
        "process": process.upper(),
        "version": version,
        "low": f"{release.major}.{release.minor}",
        "high": f"{release.major}.{release.minor + 1}",
        "fingerprint": _folded(str(take_fingerprint(source))),
        "name": name,
        "parameters": parameters,
        "arguments": arguments,
    }
    names = {"name": name, "package": package, "process": process, "module": stem}
    folder = root / Path(*package.split(".")) / process
    files = {
        folder / f"patch_{stem}.py": _PATCH.format(**values),
        root / "tests" / "unit" / "patch" / f"test_patch_{stem}.py": _UNIT.format(**names),
        root / "tests" / "e2e" / f"test_patch_{stem}_running.py": _E2E.format(**names),
    }
    for path in files:
        if path.exists():
            raise PatchError(f"{path} exists; add the patch there by hand")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return list(files)


def _folded(fingerprint: str, width: int = 95) -> str:
    lines, line = [], ""
    for word in fingerprint.split():
        if len(line) + len(word) + 1 > width:
            lines.append(line)
            line = ""
        line += f" {word}" if lines or line else word
    lines.append(line)
    return "\n".join(f'            "{part}"' for part in lines)


def _parameters(source: str) -> tuple[str, str]:
    """(parameter list, call that passes everything on) of a function's source; a class gets the general form."""
    found = re.match(r"(?:@\w+[^\n]*\n)*(?:async )?def \w+\((self|cls)?", source)
    first = found[1] if found and found[1] == "self" else None
    start = f"{first}, " if first else ""
    return f"{start}*args, **kwargs", f"{start}*args, **kwargs"
