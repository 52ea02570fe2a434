"""A worker's weights for servers that are started later (`--load-format backplane_peer`)."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger

from vllm_backplane.loopback.addresses import loopback_address
from vllm_backplane.model_loader.peer import description
from vllm_backplane.model_loader.weights_listener import WeightsListener, listed
from vllm_backplane.model_loader.weights_wire import Listing

logger = init_logger("vllm." + __name__)


class OfferedWeights:
    """Listed when they have been loaded, and offered when the worker is ready: until then it captures graphs, beside
    which no other thread may use the card."""

    def __init__(self, worker: Any, address: str) -> None:
        """Before they are loaded, which may change the model's configuration: others compare theirs before as well."""
        self._address = loopback_address(address).of_rank(worker.parallel_config.rank)
        self._worker = worker
        self._description = description(worker.vllm_config, worker.model_config)
        self._listed: tuple[Listing, list[torch.Tensor]] | None = None
        self._listener: WeightsListener | None = None

    def note(self) -> None:
        """They have been loaded."""
        self._listed = listed(self._worker.model_runner.get_model(), self._description)

    def begin(self) -> None:
        assert self._listed is not None
        accelerator, card = self._worker.accelerator, self._worker.card
        self._listener = WeightsListener(
            self._address, *self._listed, lambda: accelerator.set_current(card), logger.warning
        )
        logger.info("Weights: other servers of this host may load them from %s.", self._address)

    def changed(self) -> None:
        if self._listener is not None:
            self._listener.weights_changed()
