"""A new patch and its two tests, with everything filled in that can be read off vLLM."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from vllm_patchbay.errors import PatchError
from vllm_patchbay.patch import templates
from vllm_patchbay.patch.declaration import check_link
from vllm_patchbay.patch.verification import made_on_demand, no_attribute, take_fingerprint
from vllm_patchbay.upstream import SymbolIndex
from vllm_patchbay.upstream.modules import Binds, Calling, Symbol

EXPLANATIONS = ("why", "how", "upstream", "remove_when")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What `patches new` was asked for."""

    target: str
    process: str
    package: str
    on_import: bool = False
    explained: Mapping[str, str] = field(default_factory=dict)
    """Of `EXPLANATIONS`; what is missing is left empty, and the patch cannot be imported before it is filled in."""


def write(wanted: Wanted, index: SymbolIndex, version: str, root: Path) -> list[Path]:
    """Write three files; refuse to overwrite one."""
    module, _, qualified = wanted.target.partition(":")
    if not qualified:
        raise PatchError(f"{wanted.target!r} names a module only; add what to patch in it: {wanted.target}:NAME")
    if not all(part.isidentifier() for part in wanted.package.split(".")):
        raise PatchError(f"{wanted.package!r} is not the dotted name of a package, such as my_plugin.patches")
    if wanted.explained.get("upstream"):
        check_link(wanted.target, wanted.explained["upstream"])
    found = index.resolve(module, qualified)
    if not found.is_found or found.symbol is None:
        unfit = made_on_demand(index, module, qualified, found) if found.is_found else ""
        if unfit:
            raise PatchError(f"{wanted.target}: {unfit}")
        raise PatchError(f"{wanted.target} does not exist in vLLM {version} ({found.reason or 'it is no definition'})")
    if (found.module, found.qualname) != (module, qualified):
        where = "inherited" if "." in qualified else "imported"
        raise PatchError(f"{wanted.target} is {where} from {found.path}; patch it there")
    unfit = no_attribute(index, found)
    if unfit:
        raise PatchError(f"{wanted.target} does not exist in vLLM {version} ({unfit}); an assignment would do nothing")
    unfit = made_on_demand(index, module, qualified, found)
    if unfit:
        raise PatchError(f"{wanted.target}: {unfit}")
    stem = _stem(module, root / Path(*wanted.package.split(".")) / wanted.process)
    name = re.sub(r"\W|(?<=[a-z])(?=[A-Z])", "_", qualified).lower()
    source = index.normalised_source_of(found.module, found.qualname)
    declaration = _declaration(name, found.symbol, source, _fields(wanted, source, version))
    why = wanted.explained.get("why") or "in one line, what is wrong with it here."
    read = templates.READ.format(name=name) if found.symbol.binds is Binds.PROPERTY else ""
    names = {"name": name, "package": wanted.package, "process": wanted.process, "module": stem, "read": read}
    folder = root / Path(*wanted.package.split(".")) / wanted.process
    files = {
        folder / f"patch_{stem}.py": templates.PATCH.format(
            target=wanted.target, why_line=_in_docstring(why), declaration=declaration.strip("\n")
        ),
        root / "tests" / "unit" / "patch" / f"test_patch_{stem}.py": templates.UNIT.format(**names),
        root / "tests" / "e2e" / f"test_patch_{stem}_running.py": templates.E2E.format(**names),
    }
    for path in files:
        if path.exists():
            raise PatchError(f"{path} exists; add the patch there by hand")
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for path in (folder / "__init__.py", folder.parent / "__init__.py"):
            path.touch()
    except OSError as fault:
        raise PatchError(f"cannot write below {root}: {fault}; give another --root") from fault
    return list(files)


def _stem(module: str, folder: Path) -> str:
    """What the file is called after: the module, and the package it is in where another module of that name has its
    patches there already."""
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        stem = "_".join(parts[-count:])
        file = folder / f"patch_{stem}.py"
        if not file.exists() or f'target="{module}:' in file.read_text(encoding="utf-8"):
            return stem
    return "_".join(parts)


def _in_docstring(text: str) -> str:
    line = text.partition("\n")[0].replace("\\", "\\\\").replace('"""', "'''")
    return f"{line} " if line.endswith('"') else line


def _fields(wanted: Wanted, source: str, version: str) -> str:
    release = Version(version)
    return templates.FIELDS.format(
        target=wanted.target,
        process=wanted.process.upper(),
        low=f"{release.major}.{release.minor}",
        high=f"{release.major}.{release.minor + 1}",
        version=version,
        fingerprint=_folded(str(take_fingerprint(source))),
        on_import="\n    on_import=True," if wanted.on_import else "",
        **{each: json.dumps(wanted.explained.get(each) or "", ensure_ascii=False) for each in EXPLANATIONS},
    )


def _declaration(name: str, symbol: Symbol, source: str, fields: str) -> str:
    if symbol.binds is Binds.CLASS:
        return templates.CLASS.format(name=name, fields=fields)
    if symbol.binds not in (Binds.FUNCTION, Binds.PROPERTY):
        return templates.CONSTANT.format(name=name, fields=fields, value=_value(source))
    is_async = symbol.signature is not None and symbol.signature.is_async
    return templates.FUNCTION.format(
        name=name,
        fields=fields,
        keyword="async def" if is_async else "def",
        call="await " if is_async else "",
        parameters=_parameters(symbol),
    )


def _parameters(symbol: Symbol) -> str:
    """Of a replacement that takes whatever the original takes; also what it passes on."""
    first = symbol.signature.parameters[0].name if symbol.signature and symbol.signature.parameters else ""
    if symbol.binds is Binds.PROPERTY:
        return first
    takes_owner = symbol.calling is not Calling.NOTHING and first in ("self", "cls")
    return f"{first}, *args, **kwargs" if takes_owner else "*args, **kwargs"


def _value(source: str) -> str:
    """What a constant is now, if it is written out."""
    [statement, *_] = ast.parse(source).body
    value = getattr(statement, "value", None)
    try:
        return repr(ast.literal_eval(value)) if value is not None else "None"
    except ValueError:
        return "None"


def _folded(fingerprint: str, width: int = 95) -> str:
    lines, line = [], ""
    for word in fingerprint.split():
        if len(line) + len(word) + 1 > width:
            lines.append(line)
            line = ""
        line += f" {word}" if lines or line else word
    lines.append(line)
    return "\n".join(f'            "{part}"' for part in lines)
