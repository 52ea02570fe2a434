"""Load format `backplane_peer`: weights from the memory of a running server, over loopback.

They come as the other worker has them, prepared for the device. So the model is made and prepared here too, with
numbers that mean nothing in the place of weights, and then everything that preparing has made is overwritten. What
would not be the same here and there is refused: another model, device, release or division among workers before
anything is allocated; other tensors, or numbers that layers keep, before a byte of them is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from vllm_backplane.errors import BackplaneError, BindingError
from vllm_backplane.peering.digests import without_origin
from vllm_backplane.runtime import configured
from vllm_backplane.settings import compat
from vllm_backplane.weights.load_formats import PEER, parse
from vllm_backplane.weights.model_state import state_of
from vllm_backplane.weights.peer_client import WeightsPeer
from vllm_backplane.weights.peer_protocol import Listing

logger = init_logger("vllm." + __name__)

INSTEAD = "load from the checkpoint by removing --load-format"


class PeerModelLoader(BaseModelLoader):
    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._settings = parse(load_config.model_loader_extra_config)

    def download_model(self, model_config: ModelConfig) -> None:
        """There is nothing to have before the weights themselves."""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> torch.nn.Module:
        address = self._settings.peer.of_rank(vllm_config.parallel_config.rank)
        peer = WeightsPeer(address, self._settings.timeout, self._settings.attempts, logger.warning)
        listing = peer.listing()
        insist_on_same(listing.description, description(vllm_config, model_config), str(address))
        model = super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        tensors = fitting(listing, model, str(address))
        peer.fill(listing, tensors)
        taken = sum(tensor.nbytes for tensor in tensors)
        logger.info("Weights: %.1f MiB in %d tensors received from %s.", taken / 2**20, len(tensors), address)
        return model

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Called before weights are prepared, which is to find the same whatever was in this memory before."""
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()


def description(vllm_config: VllmConfig, model_config: ModelConfig) -> dict[str, Any]:
    """What two workers must have in common for one to have the weights of the other, as text and numbers."""
    parallel, chosen = vllm_config.parallel_config, configured(vllm_config.additional_config)
    return {
        "model": _comparable(without_origin(model_config.hf_config.to_dict())),
        "--dtype": str(model_config.dtype),
        "--quantization": model_config.quantization,
        "--runner and --convert": [str(model_config.runner_type), str(model_config.convert_type)],
        "--tensor-parallel-size": parallel.tensor_parallel_size,
        "--pipeline-parallel-size": parallel.pipeline_parallel_size,
        "--data-parallel-size": parallel.data_parallel_size,
        "--enable-expert-parallel": parallel.enable_expert_parallel,
        "the worker's rank": parallel.rank,
        "the device": chosen.device.name,
        "reference_ops": list(chosen.setting("reference_ops")),
        "vLLM": compat.release(),
    }


def _comparable(configuration: Any) -> Any:
    """As JSON has it. Whether the head is tied vLLM settles by what a checkpoint has, which is not here; where it
    differs, the tensors do."""
    if isinstance(configuration, dict):
        return {str(key): _comparable(value) for key, value in configuration.items() if key != "tie_word_embeddings"}
    if isinstance(configuration, (list, tuple)):
        return [_comparable(value) for value in configuration]
    return configuration if isinstance(configuration, (str, int, float, bool, type(None))) else str(configuration)


def insist_on_same(theirs: dict[str, Any], ours: dict[str, Any], address: str) -> None:
    models = [given["model"] if isinstance(given.get("model"), dict) else {} for given in (theirs, ours)]
    if told := _differences(*models):
        raise BackplaneError(f"the server at {address} serves another model: {told}; name one that serves this model")
    if told := _differences(theirs, ours):
        raise BackplaneError(
            f"the server at {address} has its weights in another way: {told}; start both with the same options, or "
            + INSTEAD
        )


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """The first few."""
    absent = object()
    other = sorted(key for key in theirs | ours if theirs.get(key, absent) != ours.get(key, absent))
    return ", ".join(f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here" for key in other[:3])


def fitting(listing: Listing, model: torch.nn.Module, address: str) -> list[torch.Tensor]:
    """The tensors of a prepared model in the order of the listing."""
    tensors, numbers = state_of(model)
    theirs = {one.path: (one.dtype, one.shape) for one in listing.tensors}
    ours = {path: (str(tensor.dtype), tuple(tensor.shape)) for path, tensor in tensors.items()}
    # As text, because what is no number is not equal to itself.
    values = [{path: repr(value) for path, value in given.items()} for given in (listing.numbers, numbers)]
    if told := _differences(theirs, ours) or _differences(*values):
        raise BackplaneError(
            f"what the server at {address} made of this model's weights is not what this one would: {told}; {INSTEAD}"
        )
    repeated = [path for path, tensor in tensors.items() if _repeats(tensor)]
    if repeated:
        raise BackplaneError(
            f"{', '.join(repeated[:3])} cannot be received: one number in memory stands for several (an expanded "
            f"tensor); {INSTEAD}"
        )
    return [tensors[one.path] for one in listing.tensors]


def _repeats(tensor: torch.Tensor) -> bool:
    return any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def register() -> None:
    """Make the load format known to vLLM, once per process."""
    given = {"peer": "127.0.0.1:1"}
    try:
        present = get_model_loader(LoadConfig(load_format=PEER, model_loader_extra_config=given))
    except ValueError:
        register_model_loader(PEER)(PeerModelLoader)
        return
    if type(present) is not PeerModelLoader:
        raise BindingError(
            f"--load-format {PEER} already belongs to {type(present).__module__}; uninstall one of the two plugins"
        )
