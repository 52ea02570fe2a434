"""A worker offers its weights, as they lie in its memory, to a server that is being started."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_backplane.peering.addresses import Address, loopback_address
from vllm_backplane.peering.connection import Line, WireError
from vllm_backplane.peering.digests import digests, pieces
from vllm_backplane.peering.server import Answering
from vllm_backplane.weights import peer_protocol
from vllm_backplane.weights.model_state import state_of
from vllm_backplane.weights.peer_loader import description
from vllm_backplane.weights.peer_protocol import BYTES_PER_SECOND, Kind, Listing, Question, Status, Tensor

QUESTION_SECONDS = 10.0
STALL_SECONDS = 60.0
"""For which an asker may take nothing."""
OPTION = "weights_listen"


def listed(model: torch.nn.Module, description: dict[str, Any]) -> tuple[Listing, list[torch.Tensor]]:
    """Made when loading is over, before anything can have changed."""
    tensors, numbers = state_of(model)
    rows = tuple(
        Tensor(path, str(tensor.dtype), tuple(tensor.shape), digest.hex())
        for (path, tensor), digest in zip(tensors.items(), digests(tensors.items()), strict=True)
    )
    return Listing(description, rows, numbers), list(tensors.values())


class WeightsListener(Answering):
    def __init__(
        self,
        address: Address,
        listing: Listing,
        tensors: list[torch.Tensor],
        prepare_thread: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        """`prepare_thread` makes the worker's card that of the thread it is called in."""
        self._text, self._tensors, self._prepare_thread = listing.text(), tensors, prepare_thread
        self._digest = peer_protocol.digest(self._text)
        self._changed = False
        super().__init__(address, "the offer of weights", OPTION, tell)

    def weights_changed(self) -> None:
        """What was listed is not what is there any more."""
        self._changed = True

    def turn_away(self, connection: socket.socket) -> None:
        Line(connection, 1.0).tell_status(Status.BUSY)

    def converse(self, connection: socket.socket) -> None:
        line = Line(connection, QUESTION_SECONDS)
        question = Question.asked(line)
        if self._changed or (question.kind is Kind.GET and question.listing != self._digest):
            line.tell_status(Status.CHANGED)
            return
        if question.first > len(self._tensors):
            raise WireError(f"there is no tensor {question.first}")
        line.tell_status(Status.OK)
        if question.kind is Kind.DESCRIBE:
            peer_protocol.tell_text(Line(connection, STALL_SECONDS), self._text)
            return
        self._prepare_thread()
        for tensor in self._tensors[question.first :]:
            for piece in pieces(tensor.detach()):
                Line(connection, STALL_SECONDS + piece.nbytes / BYTES_PER_SECOND).send(piece.numpy().data)


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
