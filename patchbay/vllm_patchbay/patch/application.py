"""Applies patches to this process, once, after verifying them; and can undo all of it.

A patch is verified against vLLM's source as soon as its process starts, and carried out when the target's module is
there: importing it early could meet it half way through its own import. A module that is imported later is patched
before anyone else sees it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from vllm_patchbay.errors import PatchError
from vllm_patchbay.patch.collection import PatchFile, PatchSet, ordered, refuse_namesakes
from vllm_patchbay.patch.declaration import Patch, Process
from vllm_patchbay.patch.import_hook import when_imported
from vllm_patchbay.patch.rebinding import Rebinding, find, rebind
from vllm_patchbay.patch.verification import Outcome, Verdict, class_misfit, verify
from vllm_patchbay.upstream import SymbolIndex, installed_tree, installed_version

logger = logging.getLogger("vllm.vllm_patchbay.patch")  # vLLM configures handlers for its own logger tree only


@dataclass
class PatchSession:
    """The patches of one process: what was decided of each, and what was changed."""

    index: Callable[[], SymbolIndex]
    """Gives the source of the vLLM that is running; called only if there is a patch to verify."""
    version: str
    drift: str = "error"
    """What the session does with a patch whose target's source is unknown: 'error' raises, 'warn' applies it."""
    drift_setting: str = "PatchSession.drift to 'warn'"
    """How the plugin's user asks for 'warn', such as a variable with its value. Error messages name it."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    rebindings: dict[str, Rebinding] = field(default_factory=dict)
    _waiting: set[str] = field(default_factory=set)
    _loaded: dict[str, list[Patch]] = field(default_factory=dict)
    """Patches of features that are there, by the module that declares them."""

    @classmethod
    def for_installed_vllm(cls, **settings: Any) -> PatchSession:
        """Returns a session for the vLLM of this environment. Its source is read when there is a patch to verify."""
        return cls(cache(lambda: SymbolIndex(installed_tree())), str(installed_version()), **settings)

    def apply(self, patches: PatchSet, process: Process) -> None:
        """Verify a process's patches and carry them out as soon as their modules are there. Those of one model or
        feature come last and may only stop what imports it. One that fails stops none of the others."""
        of_process = patches.of(process)
        faults = _Faults()
        for patch in [p for p in of_process if not p.on_import] + [p for p in of_process if p.on_import]:
            with faults:
                if not patch.on_import:
                    self._decide(patch)
                if patch.name not in self.rebindings:
                    self._when_imported(patch.target_module, patch.name, partial(self._carry_out, patch))
        files = [file for file in patches.features if file.process is process]
        for module in dict.fromkeys(module for file in files for module in file.waits_for):
            with faults:
                waiting = [file for file in files if module in file.waits_for]
                self._when_imported(module, f"{process} {module}", partial(self._load, waiting, patches, module))
        faults.raise_all()

    def _when_imported(self, module: str, what: str, action: Callable[[], None]) -> None:
        """Do something once, when a module has been imported, unless it is undone before."""

        def still_wanted() -> None:
            if what in self._waiting:
                action()
                self._waiting.discard(what)

        if what in self._waiting:
            return
        self._waiting.add(what)
        try:
            when_imported(module, still_wanted)
        except Exception:
            self._waiting.discard(what)  # the module is there: whoever applies again may try again
            raise

    def _load(self, files: Iterable[PatchFile], patches: PatchSet, imported: str) -> None:
        """The feature is there: load its patches, and carry out those of the module that was imported."""
        faults = _Faults()
        for file in files:
            with faults:
                if file.module not in self._loaded:
                    found = file.load()
                    refuse_namesakes((*patches.patches, *self._features(), *found))
                    self._loaded[file.module] = found
        on_module = [p for p in (*patches.patches, *self._features()) if p.target_module == imported]
        with faults:
            PatchSet(tuple(on_module)).checked()
            loaded = {patch.name for file in files for patch in self._loaded.get(file.module, ())}
            for patch in ordered(on_module):
                if patch.name in loaded:
                    with faults:
                        self._carry_out(patch)
        faults.raise_all()

    def _features(self) -> list[Patch]:
        return [patch for found in self._loaded.values() for patch in found]

    def _decide(self, patch: Patch) -> Verdict:
        if patch.name in self.verdicts:
            return self.verdicts[patch.name]
        verdict = verify(patch, self.index(), self.version)
        if verdict.outcome in (Outcome.MISSING, Outcome.INCOMPATIBLE):
            raise PatchError(f"patch {patch.name}: {verdict.detail}")
        if verdict.outcome.stops_a_start and self.drift != "warn":
            raise PatchError(f"patch {patch.name}: {verdict.detail}\n{verdict.diff}\n{self._remedy(patch, verdict)}")
        if verdict.outcome.stops_a_start or verdict.outcome is Outcome.TOLERATED:
            logger.warning("Patch %s: %s", patch.name, verdict.detail)
        if not verdict.outcome.applies:
            logger.info("Patch %s is not applied: %s", patch.name, verdict.detail)
        self.verdicts[patch.name] = verdict
        return verdict

    def _carry_out(self, patch: Patch) -> None:
        if patch.name not in self.rebindings and self._decide(patch).outcome.applies:
            self._refuse_rival(patch)
            self.rebindings[patch.name] = rebind(patch, partial(class_misfit, patch, self.index()))
            logger.info("Patch %s applied to %s.", patch.name, patch.target)

    def _refuse_rival(self, patch: Patch) -> None:
        """Sets of patches are checked when they are made; two sets, or two names of one thing, meet only here."""
        owner, attribute, _ = find(patch)
        changed = [
            rebinding.patch.name
            for rebinding in self.rebindings.values()
            if any(place is owner and name == attribute for place, name, _, _ in rebinding.places)
        ]
        if changed and patch.after != changed[-1]:
            raise PatchError(
                f"several patches on {patch.target} ({', '.join([*changed, patch.name])}) and no one order: say "
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
        """Whether the target is what was put there, by this patch or by one on top of it. A module that was loaded
        again has its own again."""
        owner, attribute, _, _ = rebinding.places[0]
        put = [
            after
            for each in self.rebindings.values()
            for place, name, _, after in each.places
            if place is owner and name == attribute
        ]
        try:
            return find(rebinding.patch)[2] is put[-1]
        except PatchError:
            return False

    def _remedy(self, patch: Patch, verdict: Verdict) -> str:
        if verdict.outcome is Outcome.UNEXAMINED:
            remedy = f"Install a vLLM that is {patch.versions}, or a version of the plugin that knows this one"
        else:
            remedy = (
                f"Adapt the patch and record the new fingerprint ('vllm-patchbay show {patch.name}' prints it; "
                "'vllm-patchbay diff' fetches the old source to show both)"
            )
        return f"{remedy}, or set {self.drift_setting} to apply it as it is."

    def undo(self, names: Iterable[str] | None = None) -> None:
        """Put back what was there, last applied first; by default everything."""
        wanted = {*self.rebindings, *self._waiting} if names is None else set(names)
        self._waiting -= wanted
        for name in [name for name in reversed(list(self.rebindings)) if name in wanted]:
            self.rebindings[name].undo()
            del self.rebindings[name], self.verdicts[name]


class _Faults:
    """Collects what goes wrong in each of its blocks, so that the rest goes on; raised together at the end."""

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
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise PatchError("\n".join(map(str, self._found))) from self._found[0]
