"""Implements the model loader of the load format `gguf`, which passes the tensors of a mapped file to the model.

A tensor is read from the file and converted when its layer loads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from tqdm.auto import tqdm
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from vllm_backplane.errors import BackplaneError, CheckpointError
from vllm_backplane.gguf.architectures import checkpoint_tensors
from vllm_backplane.gguf.config_folder import open_source
from vllm_backplane.gguf.file import GgufFile, require_unchanged_files
from vllm_backplane.gguf.hf_config import QUANTIZATION
from vllm_backplane.gguf.lazy_tensor import named_tensors
from vllm_backplane.gguf.model_files import GgufModel
from vllm_backplane.host import host_memory


class GgufModelLoader(BaseModelLoader):
    """Loads the weights of a GGUF file into a model of vLLM. It is the load format `gguf`."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._files: list[GgufFile] = []

    def download_model(self, model_config: ModelConfig) -> None:
        """Does nothing: the model's configuration was read from the file, so the file is on this host."""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> torch.nn.Module:
        try:
            model = super().load_model(vllm_config, model_config, prefix)
            require_unchanged_files()
            return model
        finally:
            # Most tensors were packed. The embedding is read from the file in the forward pass, a few rows at a time.
            files, self._files = self._files, []
            for file in files if not host_memory.memory_is_locked() else []:
                file.forget_pages()

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        config = getattr(model_config.hf_config, "quantization_config", None)
        if not isinstance(config, dict) or config.get("quant_method") != QUANTIZATION:
            raise BackplaneError(
                f"--load-format {QUANTIZATION} loads GGUF files, and {model_config.model} is not a GGUF file; remove "
                "the option"
            )
        # Quantized layers have parameters without memory and check themselves what was loaded. A tied head is empty.
        expected = {name for name, weight in model.named_parameters() if not weight.is_meta and weight.numel()}
        file = open_source(config)
        self._files = file.files
        loaded = cast(Any, model).load_weights(_weights(file, bool(self.load_config.use_tqdm_on_load)))
        missing = sorted(expected - loaded) if loaded is not None else []
        if missing:
            raise CheckpointError(
                f"{file.path} has no weights for {', '.join(missing[:4])}{' and others' * (len(missing) > 4)}; choose "
                "a complete file"
            )


def _weights(model: GgufModel, show_progress: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the names and tensors of a model. The first rank shows a progress bar."""
    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    total = sum(location.tensor.size for location in model.tensors.values())
    with tqdm(
        total=total,
        desc=f"Loading {model.path.name}",
        unit="B",
        unit_scale=True,
        disable=not (show_progress and is_first),
        mininterval=1,
    ) as bar:
        for one in checkpoint_tensors(model):
            yield from named_tensors(one)
            bar.update(one.location.tensor.size)
