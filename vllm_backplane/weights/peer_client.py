"""Asks a running server for its weights. What breaks off is asked for again, a few times, from where it broke off."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from vllm_backplane.errors import BackplaneError
from vllm_backplane.peering.addresses import Address
from vllm_backplane.peering.connection import Line, WireError, connected
from vllm_backplane.peering.digests import digest_of
from vllm_backplane.weights import peer_protocol
from vllm_backplane.weights.peer_protocol import BYTES_PER_SECOND, Kind, Listing, Question, Status

PAUSE_SECONDS = 0.5
"""Before the first of the other attempts; twice as long before each further one."""
REMEDY = "see to it that it runs, or load from the checkpoint by removing --load-format"


class Changed(Exception):
    """It has other weights now."""


class WeightsPeer:
    def __init__(self, address: Address, seconds: float, attempts: int, tell: Callable[[str], None]) -> None:
        self._address, self._seconds, self._attempts, self._tell = address, seconds, attempts, tell
        self._listing = peer_protocol.UNKNOWN

    def listing(self) -> Listing:
        """What it has."""
        found: list[Listing] = []

        def ask() -> None:
            with self._asked(Question(Kind.DESCRIBE)) as connection:
                text = peer_protocol.text(Line(connection, self._seconds + peer_protocol.MOST_TEXT / BYTES_PER_SECOND))
            self._listing = peer_protocol.digest(text)
            found.append(Listing.read(text))

        self._attempt(ask, lambda: 0)
        return found[0]

    def fill(self, listing: Listing, tensors: Sequence[torch.Tensor]) -> None:
        """With what the listing says, in its order."""
        done = 0

        def ask() -> None:
            nonlocal done
            with self._asked(Question(Kind.GET, self._listing, done)) as connection:
                for told, tensor in list(zip(listing.tensors, tensors, strict=True))[done:]:
                    self._receive(connection, tensor)
                    if digest_of(told.path, tensor).hex() != told.digest:
                        raise WireError(f"what came for {told.path} is not what was offered")
                    done += 1

        self._attempt(ask, lambda: done)

    def _attempt(self, ask: Callable[[], None], progress: Callable[[], int]) -> None:
        """Until it succeeds, or has failed so many times without getting any further."""
        failed, reached = 0, progress()
        while True:
            try:
                return ask()
            except Changed:
                raise BackplaneError(
                    f"the server at {self._address} has been given other weights than those it was started with, and "
                    "does not offer them; start it again, or load from the checkpoint by removing --load-format"
                ) from None
            except (OSError, WireError) as fault:
                failed, reached = (failed + 1, reached) if progress() == reached else (1, progress())
                if failed >= self._attempts:
                    raise BackplaneError(
                        f"the weights could not be had from {self._address}: {fault} ({failed} attempts, "
                        f"{reached} tensors received); {REMEDY}"
                    ) from fault
                pause = PAUSE_SECONDS * 2 ** (failed - 1)
                self._tell(f"{self._address}: {fault}; it is asked again in {pause:.1f} s, from tensor {reached} on")
                time.sleep(pause)

    def _receive(self, connection: socket.socket, tensor: torch.Tensor) -> None:
        direct = tensor.is_cpu and tensor.is_contiguous()
        target = tensor.detach() if direct else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        view = target.reshape(-1).view(torch.uint8).numpy().data
        size = 1 << 24
        for start in range(0, len(view), size):  # each has its time, so that a peer that hangs is noticed soon
            part = view[start : start + size]
            Line(connection, self._seconds + len(part) / BYTES_PER_SECOND).receive_into(part)
        if not direct:
            with torch.no_grad():
                tensor.copy_(target)

    @contextmanager
    def _asked(self, question: Question) -> Iterator[socket.socket]:
        with connected(self._address, self._seconds) as connection:
            line = Line(connection, self._seconds)
            question.ask(line)
            status = line.status(Status)
            if status is Status.CHANGED:
                raise Changed
            if status is Status.BUSY:
                raise WireError("it has too many to answer")
            yield connection
