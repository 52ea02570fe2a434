"""Writes a new patch and its two tests, with every field filled in that vLLM's source determines."""

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
from vllm_patchbay.patch.verification import absence_reason, on_demand_reason, take_fingerprint
from vllm_patchbay.upstream import SymbolIndex
from vllm_patchbay.upstream.modules import Binds, MethodKind, Symbol

TEXT_FIELDS = ("why", "how", "upstream", "remove_when")
"""Fields of a patch that its author writes in words."""


@dataclass(frozen=True, slots=True)
class NewPatch:
    """Holds the arguments of ``vllm-patchbay new``."""

    target: str
    process: str
    package: str
    on_import: bool = False
    texts: Mapping[str, str] = field(default_factory=dict)
    """Values of `TEXT_FIELDS`. A missing one is left empty, and the patch cannot be imported before it is filled in."""


def write_skeleton(new: NewPatch, index: SymbolIndex, version: str, root: Path) -> list[Path]:
    """Writes a patch, its unit test and its end-to-end test below `root`, and returns their paths.

    Raises PatchError if the target cannot be patched, or if one of the files exists.
    """
    module, _, qualified = new.target.partition(":")
    if not qualified:
        raise PatchError(f"{new.target!r} names only a module; add the name to patch in it: {new.target}:NAME")
    if not all(part.isidentifier() for part in new.package.split(".")):
        raise PatchError(f"{new.package!r} is not the dotted name of a package, such as my_plugin.patches")
    if new.texts.get("upstream"):
        check_link(new.target, new.texts["upstream"])
    found = index.resolve(module, qualified)
    if not found.is_found or found.symbol is None:
        reason = on_demand_reason(index, module, qualified, found) if found.is_found else ""
        if reason:
            raise PatchError(f"{new.target}: {reason}")
        raise PatchError(f"{new.target} does not exist in vLLM {version} ({found.reason or 'it is not a definition'})")
    if (found.module, found.qualname) != (module, qualified):
        where = "inherited" if "." in qualified else "imported"
        raise PatchError(f"{new.target} is {where} from {found.path}; patch it there")
    reason = absence_reason(index, found)
    if reason:
        raise PatchError(f"{new.target} does not exist in vLLM {version} ({reason})")
    reason = on_demand_reason(index, module, qualified, found)
    if reason:
        raise PatchError(f"{new.target}: {reason}")
    stem = _stem(module, root / Path(*new.package.split(".")) / new.process)
    name = re.sub(r"\W|(?<=[a-z])(?=[A-Z])", "_", qualified).lower()
    source = index.normalized_source_of(found.module, found.qualname)
    declaration = _declaration(name, found.symbol, source, _fields(new, source, version))
    why = new.texts.get("why") or "Write here in one line what is wrong with it."
    read = templates.READ.format(name=name) if found.symbol.binds is Binds.PROPERTY else ""
    names = {"name": name, "package": new.package, "process": new.process, "module": stem, "read": read}
    folder = root / Path(*new.package.split(".")) / new.process
    files = {
        folder / f"patch_{stem}.py": templates.PATCH.format(
            target=new.target, why_line=_in_docstring(why), declaration=declaration.strip("\n")
        ),
        root / "tests" / "unit" / "patches" / f"test_patch_{stem}.py": templates.UNIT.format(**names),
        root / "tests" / "e2e" / f"test_patch_{stem}_running.py": templates.E2E.format(**names),
    }
    for path in files:
        if path.exists():
            raise PatchError(f"{path} exists; add the patch to it by hand")
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
    """Returns the name of the files after ``patch_``: that of the module, with the names of its packages in front where
    a patch file of another module has that name already."""
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        stem = "_".join(parts[-count:])
        file = folder / f"patch_{stem}.py"
        if not file.exists() or f'target="{module}:' in file.read_text(encoding="utf-8"):
            return stem
    return "_".join(parts)


def _in_docstring(text: str) -> str:
    """Returns the first line of a text, escaped for a docstring."""
    return text.partition("\n")[0].replace("\\", "\\\\").replace('"""', "'''")


def _fields(new: NewPatch, source: str, version: str) -> str:
    release = Version(version)
    return templates.FIELDS.format(
        target=new.target,
        process=new.process.upper(),
        low=f"{release.major}.{release.minor}",
        high=f"{release.major}.{release.minor + 1}",
        version=version,
        fingerprint=_wrapped(str(take_fingerprint(source))),
        on_import="\n    on_import=True," if new.on_import else "",
        **{each: json.dumps(new.texts.get(each) or "", ensure_ascii=False) for each in TEXT_FIELDS},
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
    """Returns the parameters of a replacement that accepts and passes on whatever the original accepts."""
    first = symbol.signature.parameters[0].name if symbol.signature and symbol.signature.parameters else ""
    if symbol.binds is Binds.PROPERTY:
        return first
    takes_owner = symbol.method_kind is not MethodKind.STATIC and first in ("self", "cls")
    return f"{first}, *args, **kwargs" if takes_owner else "*args, **kwargs"


def _value(source: str) -> str:
    """Returns the present value of a constant if it is a literal, else ``None``."""
    [statement, *_] = ast.parse(source).body
    value = getattr(statement, "value", None)
    try:
        return repr(ast.literal_eval(value)) if value is not None else "None"
    except ValueError:
        return "None"


def _wrapped(fingerprint: str, width: int = 95) -> str:
    """Returns a fingerprint as string literals of limited width, one per line."""
    lines, line = [], ""
    for word in fingerprint.split():
        if len(line) + len(word) + 1 > width:
            lines.append(line)
            line = ""
        line += f" {word}" if lines or line else word
    lines.append(line)
    return "\n".join(f'            "{part}"' for part in lines)
