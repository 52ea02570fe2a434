"""Applies patches to this process, once, after verifying them; and can undo all of it.

A patch is verified against vLLM's source as soon as its process starts, and carried out when the target's module is
there: importing it early could meet it half way through its own import. A module that is imported later is patched
before anyone else sees it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from vllm_backplane.errors import PatchError
from vllm_backplane.patch.collection import PatchFile, PatchSet
from vllm_backplane.patch.declaration import Patch, Process
from vllm_backplane.patch.importing import when_imported
from vllm_backplane.patch.surgery import Incision, operate
from vllm_backplane.patch.verification import Outcome, Verdict, verify
from vllm_backplane.upstream import SymbolIndex

logger = logging.getLogger("vllm.vllm_backplane.patch")


@dataclass
class Theatre:
    """The patches of one process: what was decided of each, and what was changed."""

    index: Callable[[], SymbolIndex]
    """Gives the source of the vLLM that is running; called only if there is a patch to verify."""
    version: str
    drift: str = "error"
    """'error' or 'warn': what a target whose source is unknown means."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    incisions: dict[str, Incision] = field(default_factory=dict)
    _waiting: set[str] = field(default_factory=set)

    def apply(self, patches: PatchSet, process: Process) -> None:
        """Verify a process's patches and carry them out as soon as their modules are there. Those of one model or
        feature come last and may only stop what imports it."""
        of_process = patches.of(process)
        for patch in of_process:
            if not patch.on_import:
                self._decide(patch)
                self._wait(patch)
        for patch in of_process:
            if patch.on_import:
                self._wait(patch)
        for file in patches.features:
            for module in file.waits_for if file.process is process else ():
                self._when_imported(module, f"{file.module} {module}", partial(self._load, file, patches, module))

    def _wait(self, patch: Patch) -> None:
        if patch.name not in self.incisions:
            self._when_imported(patch.target_module, patch.name, partial(self._carry_out, patch))

    def _when_imported(self, module: str, what: str, action: Callable[[], None]) -> None:
        """Do something once, when a module has been imported, unless it is undone before."""

        def still_wanted() -> None:
            if what in self._waiting:
                action()
                self._waiting.discard(what)

        if what in self._waiting:
            return
        self._waiting.add(what)
        waits = False
        try:
            waits = when_imported(module, still_wanted)
        finally:
            if not waits:
                self._waiting.discard(what)

    def _load(self, file: PatchFile, patches: PatchSet, imported: str) -> None:
        """The feature is there: load its patches, and carry out those of the module that was imported."""
        found = file.load()
        PatchSet((*patches.patches, *found)).checked()
        for patch in PatchSet(tuple(found)).of(file.process):
            if patch.target_module == imported:
                self._carry_out(patch)

    def _decide(self, patch: Patch) -> Verdict:
        if patch.name in self.verdicts:
            return self.verdicts[patch.name]
        verdict = verify(patch, self.index(), self.version)
        if verdict.outcome in (Outcome.MISSING, Outcome.INCOMPATIBLE):
            raise PatchError(f"patch {patch.name}: {verdict.detail}")
        if verdict.outcome is Outcome.DRIFTED and self.drift != "warn":
            raise PatchError(
                f"patch {patch.name}: {verdict.detail}\n{verdict.diff}\nAdapt the patch and record the new fingerprint "
                f"('vllm-backplane patches show {patch.name}' prints it; 'patches diff' fetches the old source to show "
                "both), or set BACKPLANE_PATCH_DRIFT=warn to apply it as it is."
            )
        if verdict.outcome in (Outcome.DRIFTED, Outcome.TOLERATED):
            logger.warning("Patch %s: %s", patch.name, verdict.detail)
        if not verdict.outcome.applies:
            logger.info("Patch %s is not applied: %s", patch.name, verdict.detail)
        self.verdicts[patch.name] = verdict
        return verdict

    def _carry_out(self, patch: Patch) -> None:
        if patch.name not in self.incisions and self._decide(patch).outcome.applies:
            self.incisions[patch.name] = operate(patch)
            logger.info("Patch %s applied to %s.", patch.name, patch.target)

    def undo(self, names: Iterable[str] | None = None) -> None:
        """Put back what was there, last applied first; by default everything."""
        wanted = {*self.incisions, *self._waiting} if names is None else set(names)
        self._waiting -= wanted
        for name in [name for name in reversed(list(self.incisions)) if name in wanted]:
            self.incisions.pop(name).undo()
            self.verdicts.pop(name)
