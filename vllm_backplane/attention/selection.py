"""Which attention backend a layer gets. vLLM validates nothing for an out-of-tree platform, so it happens here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum, register_backend

from vllm_backplane.device import Device
from vllm_backplane.errors import BackplaneError

if TYPE_CHECKING:
    from vllm.v1.attention.selector import AttentionSelectorConfig

BACKEND = "vllm_backplane.attention.backend.BackplaneAttentionBackend"
OVER_LATENT = "vllm_backplane.attention.mla.BackplaneLatentBackend"
OF_STATES = {
    "MAMBA1": "vllm_backplane.attention.state_metadata.MambaStateBackend",
    "MAMBA2": "vllm_backplane.attention.state_metadata.Mamba2StateBackend",
    "GDN_ATTN": "vllm_backplane.attention.state_metadata.DeltaStateBackend",
}
"""Layers that carry a state have a backend for its metadata, by vLLM's name of their kind."""


def register() -> None:
    """vLLM names backends by an enum; ours is its member for out-of-tree backends. States have no such member: there
    ours take the places of vLLM's, whose layers are replaced as well."""
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    for kind, path in OF_STATES.items():
        register_backend(MambaAttentionBackendEnum[kind], path, is_mamba=True)


def backend_path(selected: AttentionBackendEnum | None, wanted: AttentionSelectorConfig, device: Device) -> str:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    path = OVER_LATENT if wanted.use_mla else BACKEND
    backend = resolve_obj_by_qualname(path)
    if selected is not None and selected is not AttentionBackendEnum.CUSTOM:
        raise BackplaneError(
            f"attention backend {selected.name} was asked for, and device {device.name!r} has CUSTOM only; "
            "remove --attention-backend"
        )
    reasons = backend.validate_configuration(**wanted._asdict(), device_capability=None)
    if wanted.dtype not in device.capabilities.dtypes:
        reasons.append(f"device {device.name!r} cannot compute in {wanted.dtype}")
    if reasons:
        raise BackplaneError(
            f"attention as this model asks for it is not supported on device {device.name!r}: {'; '.join(reasons)} "
            f"({wanted!r}). Change the option that asks for it, or choose a device that has it"
        )
    return path
