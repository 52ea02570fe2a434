"""Implements the load format `backplane_shared`: workers of one host with the same weights keep one copy in memory.

Each worker loads as vLLM does, and then maps the weights that other workers already hold (`deduplication.py`). Workers
that will have the same weights load one after another, so that beside the shared copy there is at most one other.
"""

from __future__ import annotations

import copy
import hashlib
from contextlib import ExitStack

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from vllm_backplane.quantization.gguf.loader import GgufModelLoader
from vllm_backplane.quantization.registration import register_loader
from vllm_backplane.weights.deduplication import SharingResult, share_weights
from vllm_backplane.weights.load_formats import SHARED, SHARED_GGUF
from vllm_backplane.weights.shared_registry import WeightsRegistry

logger = init_logger("vllm." + __name__)


class _SharedWeightsMixin(BaseModelLoader):
    """Shares the weights after the loader that is next in the class hierarchy has loaded them."""

    _registry: WeightsRegistry
    _lock: ExitStack | None = None
    """Releases the loading lock, while a model is being loaded."""
    _weights_name = ""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> torch.nn.Module:
        self._registry = WeightsRegistry()  # not in __init__, because it looks for a folder for temporary files
        self._weights_name = f"{model_config.model} {model_config.revision} {vllm_config.parallel_config.rank}"
        with ExitStack() as self._lock:
            model = super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            result = share_weights(model, self._registry)
        self._lock = None
        _log_result(result)
        return model

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Takes the loading lock and loads. The lock is taken only now, when memory begins to be written: ranks may
        have to communicate while they build their models, and one that waited for the lock would block the others."""
        if self._lock is not None:
            number = int.from_bytes(hashlib.blake2b(self._weights_name.encode(), digest_size=7).digest())
            self._lock.enter_context(self._registry.loading_lock(number, _log_waiting))
        super().load_weights(model, model_config)


class SharedModelLoader(_SharedWeightsMixin, DefaultModelLoader):
    def __init__(self, load_config: LoadConfig) -> None:
        """Passes load format `auto` to vLLM's loader, which knows only its own formats. The configuration is copied,
        because other code uses it too."""
        inner = copy.copy(load_config)
        inner.load_format = "auto"
        super().__init__(inner)


class SharedGgufModelLoader(_SharedWeightsMixin, GgufModelLoader):
    pass


def _log_waiting() -> None:
    logger.info("Another worker is loading the same weights; this worker waits until it has finished.")


def _log_result(result: SharingResult) -> None:
    logger.info(
        "Weights: %s mapped from other workers, %s placed for others to map, %s of this worker's own.",
        *(f"{count / 2**20:.1f} MiB" for count in (result.mapped, result.placed, result.private)),
    )
    if result.duplicated:
        logger.warning(
            "%.1f MiB of weights are in this worker's private memory too, because something besides the model refers "
            "to them.",
            result.duplicated / 2**20,
        )
    for reason in result.unavailable:
        logger.warning(
            "Weights of another worker cannot be mapped, so this worker keeps its own copy of them: %s.", reason
        )


def register() -> None:
    """Registers the load formats with vLLM, once per process."""
    register_loader(SHARED, SharedModelLoader)
    register_loader(SHARED_GGUF, SharedGgufModelLoader)
