"""Refuses to save weights whose layout was changed after loading, because no loader could read the file.

vLLM's `save_sharded_state` and `save_tensorized_model` write a model's parameters in the layout that they have in
memory. The loaders of these files copy them into parameters as they are before weights are processed: packed blocks
would be read as rows, or quantized codes as weights.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import ModelConfig

from vllm_backplane.distributed.all_or_none import gather_failure, raise_on_reporting_rank
from vllm_backplane.layers.linear import refuse_loading


def can_be_saved(worker: Any, method: str) -> bool:
    """Returns whether all workers can save their weights. If one cannot, raises on the last rank, and returns False on
    the others."""
    reason = gather_failure(reason_not_to_save(worker.model_runner.get_model(), worker.model_config, method))
    if reason is not None:
        raise_on_reporting_rank(worker.parallel_config, worker.rank, reason)
    return reason is None


def reason_not_to_save(model: torch.nn.Module, config: ModelConfig, method: str) -> str | None:
    """Returns why no loader could read what the method would write, and the remedy; None if the file can be loaded."""
    rearranged = [
        name
        for name, parameter in model.named_parameters()
        if getattr(parameter, "weight_loader", None) is refuse_loading
    ]
    if config.quantization is not None:
        why = f"the weights of this model are quantized ({config.quantization}), in the device's own layout"
    elif rearranged:
        why = f"{len(rearranged)} weights, such as {rearranged[0]}, were rearranged for this device after loading"
    else:
        return None
    return (
        f"{method} writes weights in this device's layout, and no loader could read them: {why}. Load the original "
        "checkpoint; --load-format backplane_shared and backplane_peer save workers and servers of one host memory and "
        "loading time"
    )
