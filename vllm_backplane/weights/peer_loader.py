"""Implements the load format `backplane_peer`, which loads weights from the memory of a running server, over loopback.

The weights arrive as the other worker has them, after `process_weights_after_loading`. So the model is built and
processed here too, with zeros in place of weights, and then every tensor of the result is overwritten. A difference
between the two servers is an error: another model, device, vLLM release or parallel layout before anything is
allocated; other tensors, or other scalars of layers, before the first tensor is requested.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from vllm_backplane.errors import BackplaneError
from vllm_backplane.peering.digests import without_model_path
from vllm_backplane.quantization.registration import register_loader
from vllm_backplane.runtime import configured
from vllm_backplane.settings import compat
from vllm_backplane.weights.load_formats import PEER, parse_peer_settings
from vllm_backplane.weights.model_tensors import model_tensors
from vllm_backplane.weights.weights_client import WeightsClient
from vllm_backplane.weights.weights_protocol import Manifest

logger = init_logger("vllm." + __name__)

_REMEDY = "load from the checkpoint by removing --load-format"


class PeerModelLoader(BaseModelLoader):
    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._settings = parse_peer_settings(load_config.model_loader_extra_config)

    def download_model(self, model_config: ModelConfig) -> None:
        """Does nothing: no files are needed besides the model's configuration."""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> torch.nn.Module:
        address = self._settings.peer.of_rank(vllm_config.parallel_config.rank)
        client = WeightsClient(address, self._settings.timeout, self._settings.attempts, logger.warning)
        manifest = client.fetch_manifest()
        require_compatible(manifest.description, compatibility_description(vllm_config, model_config), str(address))
        model = super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        tensors = matching_tensors(manifest, model, str(address))
        client.fetch_tensors(manifest, tensors)
        received = sum(tensor.nbytes for tensor in tensors)
        logger.info("Weights: %.1f MiB in %d tensors received from %s.", received / 2**20, len(tensors), address)
        return model

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Sets all parameters to zero. vLLM then processes them, and the result must not depend on what this memory
        held before."""
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()


def compatibility_description(vllm_config: VllmConfig, model_config: ModelConfig) -> dict[str, Any]:
    """Returns what two workers must have in common for one to use the weights of the other, as JSON values. The keys
    are part of the protocol, and appear in error messages."""
    parallel, chosen = vllm_config.parallel_config, configured(vllm_config.additional_config)
    return {
        "model": _comparable(without_model_path(model_config.hf_config.to_dict())),
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
        "vLLM": compat.vllm_version(),
    }


def _comparable(configuration: Any) -> Any:
    """Returns a configuration as JSON values, without `tie_word_embeddings`: vLLM sets that from the tensors of the
    checkpoint, which the new server does not have. If it differs, the tensors differ too."""
    if isinstance(configuration, dict):
        return {str(key): _comparable(value) for key, value in configuration.items() if key != "tie_word_embeddings"}
    if isinstance(configuration, (list, tuple)):
        return [_comparable(value) for value in configuration]
    return configuration if isinstance(configuration, (str, int, float, bool, type(None))) else str(configuration)


def require_compatible(theirs: dict[str, Any], ours: dict[str, Any], address: str) -> None:
    """Raises if the two descriptions differ."""
    models = [given["model"] if isinstance(given.get("model"), dict) else {} for given in (theirs, ours)]
    if differences := _differences(*models):
        raise BackplaneError(
            f"the server at {address} serves another model: {differences}; name a server of this model in 'peer'"
        )
    if differences := _differences(theirs, ours):
        raise BackplaneError(
            f"the server at {address} runs with options that make its weights different: {differences}; start both "
            f"servers with the same options, or {_REMEDY}"
        )


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """Returns the first three differences as text, or an empty text."""
    absent = object()
    keys = sorted(key for key in theirs | ours if theirs.get(key, absent) != ours.get(key, absent))
    return ", ".join(f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here" for key in keys[:3])


def matching_tensors(manifest: Manifest, model: torch.nn.Module, address: str) -> list[torch.Tensor]:
    """Returns the tensors of a built and processed model in the order of the manifest. Raises if the model differs from
    the manifest."""
    tensors, scalars = model_tensors(model)
    theirs = {entry.path: (entry.dtype, entry.shape) for entry in manifest.tensors}
    ours = {path: (str(tensor.dtype), tuple(tensor.shape)) for path, tensor in tensors.items()}
    # Compared as text, because NaN is not equal to itself.
    values = [{path: repr(value) for path, value in given.items()} for given in (manifest.scalars, scalars)]
    if differences := _differences(theirs, ours) or _differences(*values):
        raise BackplaneError(
            f"the server at {address} has processed this model's weights in another way than this server would: "
            f"{differences}; {_REMEDY}"
        )
    expanded = [path for path, tensor in tensors.items() if _is_expanded(tensor)]
    if expanded:
        raise BackplaneError(
            f"{', '.join(expanded[:3])} cannot be received: several elements share one place in memory (an expanded "
            f"tensor); {_REMEDY}"
        )
    return [tensors[entry.path] for entry in manifest.tensors]


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def register() -> None:
    """Registers the load format with vLLM, once per process."""
    register_loader(PEER, PeerModelLoader, extra_config={"peer": "127.0.0.1:1"})
