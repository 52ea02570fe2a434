"""Holds the patches that Backplane applies to vLLM, and finds those of distributions that bring a device.

There is one folder for each kind of process that has patches (`platform/`; the others would be `engine/` and
`worker/`), with one ``patch_<name>.py`` for each patched function of vLLM. The name is that of the patched module, or
states what the patch is for (``patch_gguf_model.py``).
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
