"""Selects the attention backend of a layer and validates it.

vLLM does not validate the backend that an out-of-tree platform selects, so this module does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum, register_backend

from vllm_backplane.device import Device
from vllm_backplane.errors import BackplaneError

if TYPE_CHECKING:
    from vllm.v1.attention.selector import AttentionSelectorConfig

BACKEND = "vllm_backplane.attention.backend.BackplaneAttentionBackend"
MLA_BACKEND = "vllm_backplane.attention.mla.BackplaneMLABackend"
STATE_BACKENDS = {
    "MAMBA1": "vllm_backplane.attention.state_metadata.MambaStateBackend",
    "MAMBA2": "vllm_backplane.attention.state_metadata.Mamba2StateBackend",
    "GDN_ATTN": "vllm_backplane.attention.state_metadata.DeltaStateBackend",
}
"""Metadata backends of layers with a recurrent state, by vLLM's enum member for the kind of layer."""


def register() -> None:
    """Registers Backplane's backends with vLLM, which names backends by enums.

    The attention backend takes the enum member for out-of-tree backends. Recurrent states have no such member; those
    backends replace vLLM's own, as Backplane replaces the layers that use them.
    """
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    for kind, path in STATE_BACKENDS.items():
        register_backend(MambaAttentionBackendEnum[kind], path, is_mamba=True)


def backend_path(selected: AttentionBackendEnum | None, wanted: AttentionSelectorConfig, device: Device) -> str:
    """Returns the import path of the backend for a layer. Raises BackplaneError if it does not support the layer."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    path = MLA_BACKEND if wanted.use_mla else BACKEND
    backend = resolve_obj_by_qualname(path)
    if selected is not None and selected is not AttentionBackendEnum.CUSTOM:
        raise BackplaneError(
            f"attention backend {selected.name} was requested, and device {device.name!r} has CUSTOM only; remove "
            "--attention-backend"
        )
    reasons = backend.validate_configuration(**wanted._asdict(), device_capability=None)
    if wanted.dtype not in device.capabilities.dtypes:
        reasons.append(f"device {device.name!r} cannot compute in {wanted.dtype}")
    if reasons:
        raise BackplaneError(
            f"the attention of this model is not supported on device {device.name!r}: {'; '.join(reasons)} "
            f"({wanted!r}). Change the option that requests it, or choose a device that supports it"
        )
    return path
