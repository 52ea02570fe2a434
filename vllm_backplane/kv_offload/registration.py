"""Registers the KV offload connector with vLLM."""

from __future__ import annotations

from vllm_backplane.kv_offload.settings import NAME

_registered = False


def register() -> None:
    """Registers the connector by name, once per process. vLLM imports its module when a user names it."""
    global _registered
    if _registered:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # Raises if another plugin has registered the name.
    KVConnectorFactory.register_connector(NAME, "vllm_backplane.kv_offload.connector", "BackplaneOffloadConnector")
    _registered = True
