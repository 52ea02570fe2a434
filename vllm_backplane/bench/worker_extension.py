"""Adds methods to the worker that describe what it computes with, and measure the memory bandwidth.

vLLM mixes the class into its worker (`--worker-extension-cls`), so that the memory is read by the threads that compute.
"""

from __future__ import annotations

import time
from typing import Any

import torch

READ_BYTES = 256 << 20
"""Bytes that are read at a time: more than the caches of most processors hold."""


class BenchExtension:
    """Defines the methods. `self` is a `BackplaneWorker`."""

    def bench_facts(self: Any) -> dict[str, Any]:
        """Returns the device, its threads, and the bytes of weights that are read for each decoded token."""
        device = self.backplane_device
        return {
            "device": device.name,
            "card": device.properties(self.card).name,
            "threads": torch.get_num_threads() if device.capabilities.host_memory else None,
            "weight_bytes_per_token": weight_bytes_per_token(self.get_model()),
        }

    def bench_read_memory(self: Any, repeats: int) -> list[float]:
        """Returns the bytes per second of each of some readings of the memory. It is empty on a device that does not
        measure its memory."""
        device = self.backplane_device
        count = min(READ_BYTES, device.memory(self.card).free // 4) // 64 * 64
        memory = torch.ones(count, dtype=torch.uint8, device=self.device)
        rates = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            if not device.read_memory(memory):
                return []
            rates.append(count / (time.perf_counter() - began))
        return rates[1:]  # without the first, which starts threads


def weight_bytes_per_token(model: torch.nn.Module) -> int:
    """Returns the bytes of the weights that one token reads in a decode step.

    Of experts, a token reads those that are chosen for it. Of an embedding it reads one row, unless the model computes
    its logits with the embedding too.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    language_model = getattr(model, "get_language_model", None)
    if language_model is not None:
        model = language_model()  # pictures and sound are not decoded
    layers, heads, embeddings = _Weights(), _Weights(), _Weights()
    for module in model.modules():
        config = getattr(module, "moe_config", None)
        share = 1.0 if config is None else config.experts_per_token / config.num_experts
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, ParallelLMHead):
                heads.add(parameter, 1.0)
            elif not isinstance(module, VocabParallelEmbedding):
                layers.add(parameter, share)
            elif name != "blocks":  # those of a GGUF file's embedding, of which logits read a packed copy
                embeddings.add(parameter, 1.0)
    return round(layers.bytes() + (heads.bytes() or embeddings.bytes()))


class _Weights:
    """Adds up parameters, each storage once: layers may share one."""

    def __init__(self) -> None:
        self._found: dict[int, float] = {}

    def add(self, parameter: torch.nn.Parameter, share: float) -> None:
        if not parameter.is_meta:
            self._found[parameter.data_ptr()] = parameter.numel() * parameter.element_size() * share

    def bytes(self) -> float:
        return sum(self._found.values())
