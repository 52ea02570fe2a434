"""Registers the KV offload connector with vLLM, and finds the connector of this worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_backplane.kv_offload.settings import NAME

if TYPE_CHECKING:
    from vllm_backplane.kv_offload.connector import BackplaneTier

_registered = False


def register() -> None:
    """Registers the connector by name, once per process. vLLM imports its module when a user names it."""
    global _registered
    if _registered:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # Raises if another plugin has registered the name.
    KVConnectorFactory.register_connector(NAME, "vllm_backplane.kv_offload.connector", "BackplaneTier")
    _registered = True


def connector_of_worker() -> BackplaneTier | None:
    """Returns the KV offload connector of this worker, or None if the worker has none or another one."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return None
    from vllm_backplane.kv_offload.connector import BackplaneTier

    connector = get_kv_transfer_group()
    return connector if isinstance(connector, BackplaneTier) else None
