"""The patch engine: patches as declarations that are checked, explained and expire.

Usable by any plugin, without Backplane's platform: see docs/patching.md.
"""

from vllm_backplane.patch.application import Theatre
from vllm_backplane.patch.collection import ENTRY_POINT_GROUP, PatchSet
from vllm_backplane.patch.declaration import Fingerprint, Patch, Process
from vllm_backplane.patch.verification import Outcome, Verdict, take_fingerprint, verify

__all__ = [
    "ENTRY_POINT_GROUP",
    "Fingerprint",
    "Outcome",
    "Patch",
    "PatchSet",
    "Process",
    "Theatre",
    "Verdict",
    "take_fingerprint",
    "verify",
]
