"""The patches that Backplane applies to vLLM: its own, and those that a device's distribution announces.

One folder for each process, and in it one ``patch_<module>.py`` for each patched module of vLLM.
"""

from __future__ import annotations

OWN = __name__
ENTRY_POINT_GROUP = "vllm_backplane.patches"
"""Distributions of devices announce their packages of patches here; Backplane applies them after its own."""


def packages() -> list[str]:
    """Returns the packages of patches that Backplane applies, its own first."""
    from vllm_patchbay.patch.collection import announced_packages

    return [OWN, *announced_packages(ENTRY_POINT_GROUP)]
