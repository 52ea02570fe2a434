"""Load format `backplane_shared`: workers of one host with the same weights have them in memory once.

Each loads as ever and then maps what others hold (sharing.py). Workers that will have the same weights take turns in
loading, so that beside what they share one of them at a time has a copy of its own.
"""

from __future__ import annotations

import copy
import hashlib
from contextlib import ExitStack
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from vllm_backplane.errors import BindingError
from vllm_backplane.quantization.gguf.loader import GgufModelLoader
from vllm_backplane.weights.deduplication import Outcome, share
from vllm_backplane.weights.load_formats import SHARED, SHARED_GGUF
from vllm_backplane.weights.shared_registry import Board

logger = init_logger("vllm." + __name__)


class _Sharing(BaseModelLoader):
    _board: Board
    _turn: ExitStack | None = None
    _part = ""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> torch.nn.Module:
        self._board = Board()  # not before: a folder for temporary files is looked for
        self._part = f"{model_config.model} {model_config.revision} {vllm_config.parallel_config.rank}"
        with ExitStack() as self._turn:
            model = super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            outcome = share(model, self._board)
        self._turn = None
        _tell(outcome)
        return model

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """From here on memory is written to. Before, workers may have to meet while they build their models, and one
        that waits for its turn would keep the others waiting."""
        if self._turn is not None:
            number = int.from_bytes(hashlib.blake2b(self._part.encode(), digest_size=7).digest())
            self._turn.enter_context(self._board.turn(number, _tell_waiting))
        super().load_weights(model, model_config)


class SharedModelLoader(_Sharing, DefaultModelLoader):
    def __init__(self, load_config: LoadConfig) -> None:
        """vLLM's loader goes by its own formats, and the configuration is not this loader's alone."""
        inner = copy.copy(load_config)
        inner.load_format = "auto"
        super().__init__(inner)


class SharedGgufModelLoader(_Sharing, GgufModelLoader):
    pass


def _tell_waiting() -> None:
    logger.info("Another worker loads the same weights; this one waits for its turn.")


def _tell(outcome: Outcome) -> None:
    logger.info(
        "Weights: %s mapped from other workers, %s placed for others to map, %s of this worker's own.",
        *(f"{count / 2**20:.1f} MiB" for count in (outcome.found, outcome.placed, outcome.own)),
    )
    if outcome.kept:
        logger.warning(
            "%.1f MiB of weights are in this worker's own memory as well: not only the model holds on to them.",
            outcome.kept / 2**20,
        )
    for reason in outcome.unreachable:
        logger.warning("Weights that another worker offers cannot be mapped, so this one has its own: %s.", reason)


_LOADERS: dict[str, Any] = {SHARED: SharedModelLoader, SHARED_GGUF: SharedGgufModelLoader}


def register() -> None:
    """Make the load formats known to vLLM, once per process."""
    for name, loader in _LOADERS.items():
        try:
            present = get_model_loader(LoadConfig(load_format=name))
        except ValueError:
            register_model_loader(name)(loader)
            continue
        if type(present) is not loader:
            raise BindingError(
                f"--load-format {name} already belongs to {type(present).__module__}; uninstall one of the two plugins"
            )
