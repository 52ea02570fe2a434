"""Compares two vLLMs for a plugin and collects the tasks of all sections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_patchbay.audit.plugin_files import collect
from vllm_patchbay.audit.run import audit, read_one
from vllm_patchbay.audit.vllm_target import VllmTarget
from vllm_patchbay.upgrade import plugin_changes
from vllm_patchbay.upgrade.hooks import hooks
from vllm_patchbay.upgrade.items import Item, Upgrade
from vllm_patchbay.upgrade.settings import settings
from vllm_patchbay.upstream.source import SourceTree


def upgrade(
    path: Path,
    before: SourceTree,
    after: SourceTree,
    *,
    exclude: Sequence[str] = (),
    workers: int = 1,
    progress: Callable[[str], None] = lambda _message: None,
) -> Upgrade:
    """Returns the tasks of an upgrade of the plugin at `path` from the vLLM `before` to the vLLM `after`."""
    progress(f"auditing {path} against both releases")
    report = audit(path, [before, after], exclude=exclude, workers=workers, diff=True)
    collection = collect(path, exclude)
    plugin = collection.plugin
    roots = plugin.packages | {"vllm"}
    plugin.gather([read_one(file, collection.wheel, roots) for file in plugin.files])
    old, new = VllmTarget(before, plugin), VllmTarget(after, plugin)
    items: list[Item] = list(plugin_changes.findings(report, new.label))
    progress("comparing overridden methods, registrations, patches and guards")
    derived = plugin_changes.classes(old, new)
    items += plugin_changes.new_abstract_methods(derived, old, new)
    items += plugin_changes.changed(plugin_changes.dependencies(plugin, derived, old, new), old, new)
    items += plugin_changes.patches(plugin, old, new)
    progress("comparing hooks, environment variables and configuration")
    items += hooks(plugin, derived, old, new)
    items += settings(plugin, old, new)
    return Upgrade(str(path), old.label, new.label, tuple(dict.fromkeys(items)))
