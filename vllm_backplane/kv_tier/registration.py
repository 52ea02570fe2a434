"""Makes the connector known to vLLM, by name; its module is imported when it is used."""

from __future__ import annotations

from vllm_backplane.kv_tier.settings import NAME

_registered = False


def register() -> None:
    """Once per process, however often it is called."""
    global _registered
    if _registered:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # Raises if another plugin has taken the name.
    KVConnectorFactory.register_connector(NAME, "vllm_backplane.kv_tier.connector", "BackplaneTier")
    _registered = True
