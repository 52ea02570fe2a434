"""The patch engine applies patches that are declared as data: they are checked, explained, and expire.

Any vLLM plugin can use it: see docs/patching.md.
"""

from vllm_patchbay.patch.application import PatchSession
from vllm_patchbay.patch.collection import ENTRY_POINT_GROUP, PatchSet
from vllm_patchbay.patch.declaration import Fingerprint, Patch, Process
from vllm_patchbay.patch.verification import Outcome, Verdict, take_fingerprint, verify

__all__ = [
    "ENTRY_POINT_GROUP",
    "Fingerprint",
    "Outcome",
    "Patch",
    "PatchSession",
    "PatchSet",
    "Process",
    "Verdict",
    "take_fingerprint",
    "verify",
]
