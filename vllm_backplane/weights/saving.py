"""Weights that were put in another form after loading are not written as if they were a checkpoint.

vLLM's `save_sharded_state` and `save_tensorized_model` write a model's parameters as they lie in memory, and its
loaders copy such files into parameters as they are before that form: blocks would be read as rows, or codes as weights.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import ModelConfig

from vllm_backplane.distributed.all_or_none import agree, refuse
from vllm_backplane.layers.linear import refuse_loading


def can_be_saved(worker: Any, method: str) -> bool:
    """By all workers, or by none; then the last one tells why."""
    reason = agree(obstacle(worker.model_runner.get_model(), worker.model_config, method))
    if reason is not None:
        refuse(worker.parallel_config, worker.rank, reason)
    return reason is None


def obstacle(model: torch.nn.Module, config: ModelConfig, method: str) -> str | None:
    """Why the method would write what cannot be loaded, with the remedy."""
    changed = [
        name
        for name, parameter in model.named_parameters()
        if getattr(parameter, "weight_loader", None) is refuse_loading
    ]
    if config.quantization is not None:
        why = f"the weights of this model are quantized ({config.quantization}), in a layout of the device's own"
    elif changed:
        why = f"{len(changed)} weights, such as {changed[0]}, were put in another order for this device after loading"
    else:
        return None
    return (
        f"{method} writes weights as they lie in memory, and no loader could read them: {why}. Load the checkpoint "
        "itself; --load-format backplane_shared and backplane_peer spare workers and servers of one host the time"
    )
