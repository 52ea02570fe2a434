"""Holds the guards of code that depends on private source of vLLM, and verifies them when a worker starts.

`guarded` declares, beside such code, the functions of vLLM that it was written against. `fingerprints.json` has their
fingerprints in every supported release (`vllm-backplane patches record` writes it). If the installed vLLM has others, a
fast path is switched off and vLLM's own code runs; any other code stops the start. Code that only some servers run
names a feature, and stops only those. docs/internals/versions.md has the details.
"""

from __future__ import annotations

from pathlib import Path

from vllm_patchbay.patch import Guards
from vllm_patchbay.patch.guard import RECORD_FILE

_GUARDS = Guards(Path(__file__).with_name(RECORD_FILE), setting="BACKPLANE_PATCH_DRIFT=warn")

guarded = _GUARDS.guarded


def set_drift(drift: str) -> None:
    """Sets what a drift does from now on in this process: 'error' or 'warn'."""
    _GUARDS.drift = drift


def verify_guards() -> None:
    """Verifies the guards without a feature of all modules that this process has imported since the last call. Raises
    PatchError if the source of a target is not known, unless the drift is 'warn' or the guard is that of a fast
    path."""
    _GUARDS.verify_installed()


def use_feature(feature: str) -> None:
    """Verifies the guards of a feature at its first use, as `verify_guards` does. Classes with a guard and a feature
    call it when they are constructed."""
    _GUARDS.use(feature)


def is_switched_off(fast_path: str) -> bool:
    """Returns whether a fast path is switched off because vLLM's source is not the one that it was written against."""
    return _GUARDS.is_switched_off(fast_path)


def switched_off() -> dict[str, str]:
    """Returns the fast paths that are switched off in this process, with the reasons."""
    return dict(_GUARDS.switched_off)
