"""Finds environment variables and fields of the configuration that are new, gone, or have another default."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vllm_patchbay.audit.plugin import Plugin
from vllm_patchbay.audit.vllm_target import VllmTarget
from vllm_patchbay.upgrade.items import Item, Section
from vllm_patchbay.upstream.source import SourceTree
from vllm_patchbay.upstream.survey import VARIABLES_MODULE, VARIABLES_TABLE

_CONFIGURATION = ("vllm.config", "vllm.engine.arg_utils")
"""Modules and packages whose classes hold the configuration."""
_OWN_VARIABLES = "VLLM_"
_ON = frozenset({"1", "true", "on", "yes"})
"""Texts that switch a setting on."""
_LONGEST = 120


@dataclass(frozen=True, slots=True)
class Setting:
    """Describes an environment variable or a field of the configuration in one release."""

    name: str
    """Name of the variable, or ``module:Class.field``."""
    default: str | None
    """Expression of the default; None if it has none, or if a function makes it."""
    declaration: str = ""
    """Declaration of a field."""
    is_read: bool = False
    """Whether the plugin uses the variable, or the class of the field."""
    copy_of: str = ""
    """``Class.field`` from which an engine argument takes its default."""

    @property
    def is_on(self) -> bool:
        """Returns whether the setting is a switch that is on by default."""
        try:
            value = ast.literal_eval(self.default or "None")
        except ValueError:
            return False
        return value is True or (isinstance(value, str) and value.lower() in _ON)


def settings(plugin: Plugin, old: VllmTarget, new: VllmTarget) -> Iterator[Item]:
    """Yields what the plugin should decide about: changed defaults, then new settings that are on by default or belong
    to a class that the plugin reads. The last task names all others."""
    used = plugin.variables_read | plugin.variables_declared
    before, after = ({**_variables_of(each, used), **_fields_of(each, plugin)} for each in (old, new))
    yield from _changed_defaults(plugin, before, after)
    added = _without_copies([after[name] for name in sorted(after.keys() - before.keys())])
    first = [setting for setting in added if setting.is_on or setting.is_read]
    for setting in sorted(first, key=lambda setting: (not setting.is_on, not setting.is_read)):
        yield Item(Section.SETTINGS, setting.name, _description(setting))
    gone = [before[name] for name in sorted(before.keys() - after.keys())]
    for setting in gone:
        if _depends_on(plugin, setting):
            text = "is not read any more, and the plugin uses it"
            if ":" in setting.name:
                text = "is gone; the plugin reads an attribute of this name"
            yield Item(Section.CHANGED, setting.name, text)
    rest = {
        "new": [_short(setting, setting.default or "None") for setting in added if setting not in first],
        "gone": [_short(setting, "None") for setting in gone if not _depends_on(plugin, setting)],
    }
    if count := sum(map(len, rest.values())):
        text = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in rest.items() if names)
        yield Item(Section.SETTINGS, f"{count} that the plugin does not read, and no new one is on by default", text)


def _changed_defaults(plugin: Plugin, before: Mapping[str, Setting], after: Mapping[str, Setting]) -> Iterator[Item]:
    for name in sorted(before.keys() & after.keys()):
        first, second = before[name], after[name]
        if first.default != second.default:
            depends = _depends_on(plugin, second)
            text = f"has the default {second.default} now, and had {first.default}"
            text += "; the plugin reads it" if depends else ""
            yield Item(Section.CHANGED if depends else Section.SETTINGS, name, text)


def _depends_on(plugin: Plugin, setting: Setting) -> bool:
    """Returns whether the plugin reads a variable, or an attribute with the name of a field of a class that it
    reads."""
    is_field = ":" in setting.name
    return setting.is_read and (not is_field or setting.name.rpartition(".")[2] in plugin.attributes_read)


def _without_copies(found: list[Setting]) -> list[Setting]:
    """Returns settings without engine arguments that stand for a field of the list."""
    fields = {setting.name.partition(":")[2] for setting in found if ":" in setting.name}
    return [setting for setting in found if setting.copy_of not in fields]


def _description(setting: Setting) -> str:
    if ":" in setting.name:
        return f"is a new field: {setting.declaration}"
    return "is a new environment variable" + (f" with the default {setting.default}" if setting.default else "")


def _short(setting: Setting, default: str) -> str:
    name = setting.name.partition(":")[2] or setting.name
    return f"`{name}`" if default == "None" else f"`{name}={default}`"


# --- environment variables


def _variables_of(target: VllmTarget, used: frozenset[str]) -> dict[str, Setting]:
    """Returns vLLM's own environment variables, and others that the plugin uses too."""
    defaults = _variable_defaults(target.tree)
    names = [name for name in target.survey.variables if name.startswith(_OWN_VARIABLES) or name in used]
    return {name: Setting(name, defaults.get(name), is_read=name in used) for name in names}


def _variable_defaults(tree: SourceTree) -> dict[str, str]:
    """Returns the defaults in vLLM's table of environment variables: the second argument of the call that reads one."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(tree.read(f"{tree.package}.{VARIABLES_MODULE}") or "")):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        is_table = any(isinstance(each, ast.Name) and each.id == VARIABLES_TABLE for each in targets)
        if not is_table or not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(node.value, ast.Dict):
            continue
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            for call in ast.walk(value):
                if not isinstance(key, ast.Constant) or not isinstance(call, ast.Call) or len(call.args) < 2:
                    continue
                if isinstance(call.args[0], ast.Constant) and call.args[0].value == key.value:
                    found[str(key.value)] = ast.unparse(call.args[1])
                    break
    return {name: default for name, default in found.items() if default != "None"}


# --- fields of the configuration


def _fields_of(target: VllmTarget, plugin: Plugin) -> dict[str, Setting]:
    """Returns the annotated fields of all configuration classes."""
    declared: dict[str, ast.AnnAssign] = {}
    for module in target.tree.modules():
        if module not in _CONFIGURATION and not module.startswith(_CONFIGURATION[0] + "."):
            continue
        for node in ast.parse(target.tree.read(module) or "").body:
            if isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                        declared[f"{module}:{node.name}.{each.target.id}"] = each
    read = _classes_read(plugin, declared)
    by_class = {name.partition(":")[2]: _default_of(node)[0] for name, node in declared.items()}
    found: dict[str, Setting] = {}
    for name, node in declared.items():
        default, copy_of = _default_of(node)
        text = ast.unparse(node)
        text = text if len(text) < _LONGEST else text[: _LONGEST - 3] + "…"
        is_read = name.partition(":")[2].partition(".")[0] in read
        found[name] = Setting(name, by_class.get(copy_of, default), text, is_read, copy_of)
    return found


def _default_of(node: ast.AnnAssign) -> tuple[str | None, str]:
    """Returns the default of a field, and the ``Class.field`` whose default it has."""
    value = node.value
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
        return ast.unparse(value), ast.unparse(value)
    if not isinstance(value, ast.Call):
        return (None if value is None else ast.unparse(value)), ""
    if ast.unparse(value.func) == "get_field" and len(value.args) == 2:
        owner, name = value.args
        return None, f"{ast.unparse(owner)}.{getattr(name, 'value', '')}"
    given = next((each.value for each in value.keywords if each.arg == "default"), None)
    return (None if given is None else ast.unparse(given)), ""


def _classes_read(plugin: Plugin, declared: Mapping[str, ast.AnnAssign]) -> set[str]:
    """Returns the configuration classes that the plugin names, or reads from a field of one."""
    classes = {name.partition(":")[2].partition(".")[0] for name in declared}
    words = set(re.findall(r"\w+", " ".join(plugin.tree.read(file.module) or "" for file in plugin.files)))
    found = classes & words
    for name, node in declared.items():
        if name.rpartition(".")[2] in plugin.attributes_read:
            found |= classes & set(re.findall(r"\w+", ast.unparse(node.annotation)))
    return found
