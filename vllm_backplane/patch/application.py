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
from vllm_backplane.patch.collection import PatchSet
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
        """Verify a process's patches and carry them out as soon as their modules are there."""
        for patch in patches.of(process):
            if not patch.on_import:
                self._decide(patch)
            if patch.name in self.incisions or patch.name in self._waiting:
                continue
            if when_imported(patch.target_module, partial(self._carry_out, patch)):
                self._waiting.add(patch.name)

    def _decide(self, patch: Patch) -> Verdict:
        if patch.name in self.verdicts:
            return self.verdicts[patch.name]
        verdict = verify(patch, self.index(), self.version)
        if verdict.outcome in (Outcome.MISSING, Outcome.INCOMPATIBLE):
            raise PatchError(f"patch {patch.name}: {verdict.detail}")
        if verdict.outcome is Outcome.DRIFTED and self.drift != "warn":
            raise PatchError(
                f"patch {patch.name}: {verdict.detail}\n{verdict.diff}\nAdapt the patch and record the new fingerprint "
                "('vllm-backplane patches show' prints it), or set BACKPLANE_PATCH_DRIFT=warn to apply it as it is."
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
        wanted = set(self.incisions if names is None else names)
        for name in [name for name in reversed(list(self.incisions)) if name in wanted]:
            self.incisions.pop(name).undo()
            self.verdicts.pop(name)
            self._waiting.discard(name)
