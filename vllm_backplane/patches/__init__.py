"""Holds the patches that Backplane applies to vLLM, and finds those of distributions that bring a device.

There is one folder for each process, with one ``patch_<module>.py`` for each patched module of vLLM. At present all
patches are in `platform/`; `engine/` and `worker/` are empty.
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
