"""Declares, verifies, applies and undoes patches of vLLM.

A patch is data beside its code: its target, its reason, the source that it was written against, and the condition for
its removal. Any vLLM plugin can use this package. It imports `upstream` and nothing of vLLM.
"""

from vllm_patchbay.patch.collection import ENTRY_POINT_GROUP, PatchSet
from vllm_patchbay.patch.declaration import Fingerprint, Patch, Process
from vllm_patchbay.patch.guard import Guard, GuardedPackage, Guards, OnDrift
from vllm_patchbay.patch.session import PatchSession
from vllm_patchbay.patch.verification import Outcome, Verdict, take_fingerprint, verify

__all__ = [
    "ENTRY_POINT_GROUP",
    "Fingerprint",
    "Guard",
    "GuardedPackage",
    "Guards",
    "OnDrift",
    "Outcome",
    "Patch",
    "PatchSession",
    "PatchSet",
    "Process",
    "Verdict",
    "take_fingerprint",
    "verify",
]
