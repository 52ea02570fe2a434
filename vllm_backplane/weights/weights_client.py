"""Fetches weights from a running server. A transfer that breaks off is retried from the first incomplete tensor."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from vllm_backplane.errors import BackplaneError
from vllm_backplane.peering.addresses import Address
from vllm_backplane.peering.connection import MIN_BYTES_PER_SECOND, Connection, WireError, connect
from vllm_backplane.peering.digests import tensor_digest
from vllm_backplane.weights import weights_protocol
from vllm_backplane.weights.weights_protocol import MAX_MANIFEST_BYTES, Kind, Manifest, Request, Status

RETRY_SECONDS = 0.5
"""Pause before the first retry. It doubles with every further one."""
REMEDY = "check that the server runs, or load from the checkpoint by removing --load-format"
_CHUNK_BYTES = 1 << 24


class WeightsChanged(Exception):
    """Reports that the peer's weights are no longer those of its manifest."""


class WeightsClient:
    """Requests the weights of one worker of the peer. An attempt fails after `seconds` without a response; loading
    fails after `attempts` failed attempts in a row in which no further tensor was received."""

    def __init__(self, address: Address, seconds: float, attempts: int, warn: Callable[[str], None]) -> None:
        self._address, self._seconds, self._attempts, self._warn = address, seconds, attempts, warn
        self._manifest_digest = weights_protocol.UNKNOWN

    def fetch_manifest(self) -> Manifest:
        fetched: list[Manifest] = []

        def fetch() -> None:
            with self._request(Request(Kind.DESCRIBE)) as sock:
                seconds = self._seconds + MAX_MANIFEST_BYTES / MIN_BYTES_PER_SECOND
                text = weights_protocol.receive_manifest(Connection(sock, seconds))
            self._manifest_digest = weights_protocol.manifest_digest(text)
            fetched.append(Manifest.decode(text))

        self._retry(fetch, lambda: 0)
        return fetched[0]

    def fetch_tensors(self, manifest: Manifest, tensors: Sequence[torch.Tensor]) -> None:
        """Receives the tensors of the manifest into `tensors`, which are in the same order, and checks their
        digests."""
        done = 0

        def fetch() -> None:
            nonlocal done
            with self._request(Request(Kind.GET, self._manifest_digest, done)) as sock:
                for entry, tensor in list(zip(manifest.tensors, tensors, strict=True))[done:]:
                    self._receive(sock, tensor)
                    if tensor_digest(entry.path, tensor).hex() != entry.digest:
                        raise WireError(f"the bytes received for {entry.path} do not match its digest")
                    done += 1

        self._retry(fetch, lambda: done)

    def _retry(self, fetch: Callable[[], None], progress: Callable[[], int]) -> None:
        """Calls `fetch` until it succeeds, or has failed `attempts` times in a row without progress."""
        failed, reached = 0, progress()
        while True:
            try:
                return fetch()
            except WeightsChanged:
                raise BackplaneError(
                    f"the server at {self._address} has reloaded its weights since it started, and does not offer the "
                    "new ones; restart it, or load from the checkpoint by removing --load-format"
                ) from None
            except (OSError, WireError) as fault:
                failed, reached = (failed + 1, reached) if progress() == reached else (1, progress())
                if failed >= self._attempts:
                    raise BackplaneError(
                        f"the weights could not be fetched from {self._address}: {fault} ({failed} attempts, "
                        f"{reached} tensors received); {REMEDY}"
                    ) from fault
                pause = RETRY_SECONDS * 2 ** (failed - 1)
                self._warn(f"{self._address}: {fault}; retrying in {pause:.1f} s, from tensor {reached} on")
                time.sleep(pause)

    def _receive(self, sock: socket.socket, tensor: torch.Tensor) -> None:
        direct = tensor.is_cpu and tensor.is_contiguous()
        target = tensor.detach() if direct else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        view = target.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(view), _CHUNK_BYTES):  # a deadline per chunk detects a peer that hangs early
            chunk = view[start : start + _CHUNK_BYTES]
            Connection(sock, self._seconds + len(chunk) / MIN_BYTES_PER_SECOND).receive_into(chunk)
        if not direct:
            with torch.no_grad():
                tensor.copy_(target)

    @contextmanager
    def _request(self, request: Request) -> Iterator[socket.socket]:
        """Sends a request, and yields the socket after the status. Raises unless the status is OK."""
        with connect(self._address, self._seconds) as sock:
            connection = Connection(sock, self._seconds)
            request.send(connection)
            status = connection.receive_status(Status)
            if status is Status.CHANGED:
                raise WeightsChanged
            if status is Status.BUSY:
                raise WireError("the server is busy with other requests")
            yield sock
