"""Patches that Backplane applies to vLLM: its own, and those of distributions that bring a device.

There is one folder for each process, with one ``patch_<module>.py`` for each patched module of vLLM. The modules import
`vllm_patchbay`, and the rooms whose functions their patches call.
"""

from __future__ import annotations

OWN = __name__
ENTRY_POINT_GROUP = "vllm_backplane.patches"
"""Entry-point group in which a device's distribution announces its package of patches. Backplane applies it after its
own patches."""


def packages() -> list[str]:
    """Returns the packages of patches that Backplane applies, its own first."""
    from vllm_patchbay.patch.collection import announced_packages

    return [OWN, *announced_packages(ENTRY_POINT_GROUP)]
