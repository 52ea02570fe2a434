"""A worker offers its weights, as they lie in its memory, to a server that is being started."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch

from vllm_backplane.loopback.addresses import Address
from vllm_backplane.loopback.answering import Answering
from vllm_backplane.loopback.line import Line, WireError
from vllm_backplane.loopback.sameness import digests, pieces
from vllm_backplane.model_loader import weights_wire as wire
from vllm_backplane.model_loader.state import state_of
from vllm_backplane.model_loader.weights_wire import BYTES_PER_SECOND, Kind, Listing, Question, Status, Tensor

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
        self._digest = wire.digest(self._text)
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
            wire.tell_text(Line(connection, STALL_SECONDS), self._text)
            return
        self._prepare_thread()
        for tensor in self._tensors[question.first :]:
            for piece in pieces(tensor.detach()):
                Line(connection, STALL_SECONDS + piece.nbytes / BYTES_PER_SECOND).send(piece.numpy().data)
