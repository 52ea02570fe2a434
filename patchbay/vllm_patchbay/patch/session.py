"""Applies patches to this process after verifying them, each of them once, and can undo them.

A patch is verified against vLLM's source when its process starts, and applied when the module of its target has been
imported. Patchbay does not import that module itself: at that moment the module can be in the middle of its own import.
A module that is imported later is patched before other code sees it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from vllm_patchbay.errors import PatchError
from vllm_patchbay.patch.collection import PatchFile, PatchSet, in_order, refuse_duplicate_names
from vllm_patchbay.patch.declaration import Patch, Process
from vllm_patchbay.patch.import_hook import when_imported
from vllm_patchbay.patch.rebinding import Rebinding, find_target, rebind
from vllm_patchbay.patch.verification import Outcome, Verdict, class_incompatibility, verify
from vllm_patchbay.upstream import SymbolIndex, installed_tree, installed_version

logger = logging.getLogger("vllm.vllm_patchbay.patch")  # vLLM configures handlers for its own logger tree only


@dataclass
class PatchSession:
    """Applies patches to one process, and holds the verdict on each and what was changed for it."""

    index: Callable[[], SymbolIndex]
    """Returns the source of the running vLLM. It is called when there is a patch to verify."""
    version: str
    drift: str = "error"
    """What happens to a patch whose target's source is unknown: 'error' raises, 'warn' applies the patch."""
    drift_setting: str = "PatchSession.drift to 'warn'"
    """How a user of the plugin chooses 'warn', such as a variable with its value. Error messages name it."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    rebindings: dict[str, Rebinding] = field(default_factory=dict)
    _waiting: set[str] = field(default_factory=set)
    """Names of patches and features whose module has not been imported yet."""
    _loaded: dict[str, list[Patch]] = field(default_factory=dict)
    """Patches of the features that are in use, by the module that declares them."""

    @classmethod
    def for_installed_vllm(cls, **settings: Any) -> PatchSession:
        """Returns a session for the vLLM of this environment. Its source is read when there is a patch to verify."""
        return cls(cache(lambda: SymbolIndex(installed_tree())), str(installed_version()), **settings)

    def apply(self, patches: PatchSet, process: Process) -> None:
        """Verifies the patches of a process, and applies each as soon as its module is imported.

        Patches of one model or feature come last, and their failure stops only the import of that feature. A
        patch that fails does not keep the others from being applied; the failures are raised together at the end.
        """
        of_process = patches.for_process(process)
        faults = _FaultCollector()
        for patch in [p for p in of_process if not p.on_import] + [p for p in of_process if p.on_import]:
            with faults:
                if not patch.on_import:
                    self._verify(patch)
                if patch.name not in self.rebindings:
                    self._when_imported(patch.target_module, patch.name, partial(self._rebind, patch))
        files = [file for file in patches.deferred if file.process is process]
        for module in dict.fromkeys(module for file in files for module in file.waits_for):
            with faults:
                waiting = [file for file in files if module in file.waits_for]
                self._when_imported(module, f"{process} {module}", partial(self._load, waiting, patches, module))
        faults.raise_all()

    def _when_imported(self, module: str, key: str, action: Callable[[], None]) -> None:
        """Runs an action once, when a module has been imported, unless `undo` removes its key before."""

        def run_if_waiting() -> None:
            if key in self._waiting:
                action()
                self._waiting.discard(key)

        if key in self._waiting:
            return
        self._waiting.add(key)
        try:
            when_imported(module, run_if_waiting)
        except Exception:
            self._waiting.discard(key)  # the module is imported, so that a second `apply` can try again
            raise

    def _load(self, files: Iterable[PatchFile], patches: PatchSet, imported: str) -> None:
        """Loads the patch files of a feature, and applies their patches of the module that was imported."""
        faults = _FaultCollector()
        for file in files:
            with faults:
                if file.module not in self._loaded:
                    found = file.load()
                    refuse_duplicate_names((*patches.patches, *self._features(), *found))
                    self._loaded[file.module] = found
        on_module = [p for p in (*patches.patches, *self._features()) if p.target_module == imported]
        with faults:
            PatchSet(tuple(on_module)).checked()
            loaded = {patch.name for file in files for patch in self._loaded.get(file.module, ())}
            for patch in in_order(on_module):
                if patch.name in loaded:
                    with faults:
                        self._rebind(patch)
        faults.raise_all()

    def _features(self) -> list[Patch]:
        return [patch for found in self._loaded.values() for patch in found]

    def _verify(self, patch: Patch) -> Verdict:
        """Returns the verdict on a patch. Raises PatchError if it cannot be applied, or if it drifted and `drift` is
        'error'."""
        if patch.name in self.verdicts:
            return self.verdicts[patch.name]
        verdict = verify(patch, self.index(), self.version)
        if verdict.outcome in (Outcome.MISSING, Outcome.INCOMPATIBLE):
            raise PatchError(f"patch {patch.name}: {verdict.detail}")
        if verdict.outcome.blocks_startup and self.drift != "warn":
            raise PatchError(f"patch {patch.name}: {verdict.detail}\n{verdict.diff}\n{self._remedy(patch, verdict)}")
        if verdict.outcome.blocks_startup or verdict.outcome is Outcome.TOLERATED:
            logger.warning("Patch %s: %s", patch.name, verdict.detail)
        if not verdict.outcome.applies:
            logger.info("Patch %s is not applied: %s", patch.name, verdict.detail)
        self.verdicts[patch.name] = verdict
        return verdict

    def _rebind(self, patch: Patch) -> None:
        """Puts the replacement in the target's place, if the verdict allows it and it is not there yet."""
        if patch.name not in self.rebindings and self._verify(patch).outcome.applies:
            self._refuse_conflict(patch)
            self.rebindings[patch.name] = rebind(patch, partial(class_incompatibility, patch, self.index()))
            logger.info("Patch %s applied to %s.", patch.name, patch.target)

    def _refuse_conflict(self, patch: Patch) -> None:
        """Raises PatchError if another patch changed the target and `patch` does not name it in `after`.

        A set of patches is checked for conflicts when it is made. Conflicts between two sets, or between two names of
        one object, show only here.
        """
        owner, attribute, _ = find_target(patch)
        changed = [
            rebinding.patch.name
            for rebinding in self.rebindings.values()
            if any(place is owner and name == attribute for place, name, _, _ in rebinding.places)
        ]
        if changed and patch.after != changed[-1]:
            raise PatchError(
                f"several patches replace {patch.target} ({', '.join([*changed, patch.name])}) without an order: set "
                f"after={changed[-1]!r} on {patch.name}, or undo the other"
            )

    def summary(self) -> list[str]:
        """Returns one phrase for each patch: its name and its state in this process."""
        return [f"{name} {self._state(name, verdict)}" for name, verdict in self.verdicts.items()]

    def _state(self, name: str, verdict: Verdict) -> str:
        if name in self.rebindings:
            return "applied" if self._is_in_place(self.rebindings[name]) else "NO LONGER IN PLACE"
        if not verdict.outcome.applies:
            return verdict.outcome.value
        return "waits for its module" if name in self._waiting else "NOT APPLIED"

    def _is_in_place(self, rebinding: Rebinding) -> bool:
        """Returns whether the target still is what this patch, or one on top of it, put there. A module that was
        reloaded has its own definition again."""
        owner, attribute, _, _ = rebinding.places[0]
        put = [
            after
            for each in self.rebindings.values()
            for place, name, _, after in each.places
            if place is owner and name == attribute
        ]
        try:
            return find_target(rebinding.patch)[2] is put[-1]
        except PatchError:
            return False

    def _remedy(self, patch: Patch, verdict: Verdict) -> str:
        if verdict.outcome is Outcome.UNEXAMINED:
            remedy = f"Install vLLM {patch.versions}, or a version of the plugin that supports this vLLM"
        else:
            remedy = (
                f"Adapt the patch and record the new fingerprint ('vllm-patchbay show {patch.name}' prints it; "
                f"'vllm-patchbay diff {patch.name}' downloads the old source and compares both)"
            )
        return f"{remedy}, or set {self.drift_setting} to apply the patch unchanged."

    def undo(self, names: Iterable[str] | None = None) -> None:
        """Restores what the named patches replaced, last applied first; by default all of them."""
        selected = {*self.rebindings, *self._waiting} if names is None else set(names)
        self._waiting -= selected
        for name in [name for name in reversed(list(self.rebindings)) if name in selected]:
            self.rebindings[name].undo()
            del self.rebindings[name], self.verdicts[name]


class _FaultCollector:
    """Collects the exceptions of several ``with`` blocks, so that later blocks run, and raises them together."""

    def __init__(self) -> None:
        self._found: list[Exception] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, fault: BaseException | None, _trace: object) -> bool:
        if isinstance(fault, Exception):
            self._found.append(fault)
            return True
        return False

    def raise_all(self) -> None:
        """Raises the exception that was collected, or one PatchError with the texts of several."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise PatchError("\n".join(map(str, self._found))) from self._found[0]
