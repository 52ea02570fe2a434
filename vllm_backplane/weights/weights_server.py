"""Offers the weights of a running worker, in the layout that they have in its memory, to a server that is starting."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch
from vllm.logger import init_logger

from vllm_backplane.peering.addresses import Address, loopback_address
from vllm_backplane.peering.connection import MIN_BYTES_PER_SECOND, Connection, WireError
from vllm_backplane.peering.digests import byte_chunks, tensor_digests
from vllm_backplane.peering.server import LoopbackServer
from vllm_backplane.weights import weights_protocol
from vllm_backplane.weights.model_tensors import model_tensors
from vllm_backplane.weights.peer_loader import compatibility_description
from vllm_backplane.weights.weights_protocol import Kind, Manifest, Request, Status, TensorEntry

logger = init_logger("vllm." + __name__)

REQUEST_SECONDS = 10.0
"""Seconds in which a request must have been received."""
STALL_SECONDS = 60.0
"""Seconds for which a client may stop receiving."""
OPTION = "weights_listen"


def build_manifest(model: torch.nn.Module, description: dict[str, Any]) -> tuple[Manifest, list[torch.Tensor]]:
    """Returns the manifest of a model and its tensors in the same order. To be called right after loading, before
    anything can have changed."""
    tensors, scalars = model_tensors(model)
    entries = tuple(
        TensorEntry(path, str(tensor.dtype), tuple(tensor.shape), digest.hex())
        for (path, tensor), digest in zip(tensors.items(), tensor_digests(tensors.items()), strict=True)
    )
    return Manifest(description, entries, scalars), list(tensors.values())


class WeightsServer(LoopbackServer):
    """Sends the manifest and the tensors of one worker."""

    def __init__(
        self,
        address: Address,
        manifest: Manifest,
        tensors: list[torch.Tensor],
        prepare_thread: Callable[[], None],
        warn: Callable[[str], None],
    ) -> None:
        """`prepare_thread` makes the worker's card the current one of the thread that calls it."""
        self._manifest, self._tensors, self._prepare_thread = manifest.encode(), tensors, prepare_thread
        self._digest = weights_protocol.manifest_digest(self._manifest)
        self._changed = False
        super().__init__(address, "the offer of weights", OPTION, warn)

    def invalidate(self) -> None:
        """Makes every further request fail, because the weights are no longer those of the manifest."""
        self._changed = True

    def reject(self, sock: socket.socket) -> None:
        Connection(sock, 1.0).send_status(Status.BUSY)

    def handle(self, sock: socket.socket) -> None:
        connection = Connection(sock, REQUEST_SECONDS)
        request = Request.receive(connection)
        if self._changed or (request.kind is Kind.GET and request.manifest != self._digest):
            connection.send_status(Status.CHANGED)
            return
        if request.first > len(self._tensors):
            raise WireError(f"the client requested tensor {request.first} of {len(self._tensors)}")
        connection.send_status(Status.OK)
        if request.kind is Kind.DESCRIBE:
            weights_protocol.send_manifest(Connection(sock, STALL_SECONDS), self._manifest)
            return
        self._prepare_thread()
        for tensor in self._tensors[request.first :]:
            for chunk in byte_chunks(tensor.detach()):
                Connection(sock, STALL_SECONDS + chunk.nbytes / MIN_BYTES_PER_SECOND).send(chunk.numpy().data)


class OfferedWeights:
    """Offers the weights of a worker: records them when they have been loaded, and serves them when the worker is
    ready. Until then the worker captures graphs, during which no other thread may use the card."""

    def __init__(self, worker: Any, address: str) -> None:
        """Records the model's configuration. The caller does this before loading, which may change the configuration:
        the other server compares its own configuration before loading too."""
        self._address = loopback_address(address).of_rank(worker.parallel_config.rank)
        self._worker = worker
        self._description = compatibility_description(worker.vllm_config, worker.model_config)
        self._manifest: tuple[Manifest, list[torch.Tensor]] | None = None
        self._server: WeightsServer | None = None

    def record(self) -> None:
        """Builds the manifest of the loaded model."""
        self._manifest = build_manifest(self._worker.model_runner.get_model(), self._description)

    def start_server(self) -> None:
        assert self._manifest is not None
        device, card = self._worker.backplane_device, self._worker.card
        self._server = WeightsServer(self._address, *self._manifest, lambda: device.set_current(card), logger.warning)
        logger.info("Weights: other servers of this host may load them from %s.", self._address)

    def invalidate(self) -> None:
        """Stops the offer, because the worker has loaded other weights."""
        if self._server is not None:
            self._server.invalidate()
