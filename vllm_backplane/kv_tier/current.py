"""The second KV tier of this worker, if it has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

if TYPE_CHECKING:
    from vllm_backplane.kv_tier.connector import BackplaneTier


def tier_of_worker() -> BackplaneTier | None:
    if not has_kv_transfer_group():
        return None
    from vllm_backplane.kv_tier.connector import BackplaneTier

    connector = get_kv_transfer_group()
    return connector if isinstance(connector, BackplaneTier) else None
