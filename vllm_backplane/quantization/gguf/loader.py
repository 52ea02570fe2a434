"""Load format `gguf`: weights straight from the mapped file, each converted when its layer asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from vllm_backplane.device import host
from vllm_backplane.errors import BackplaneError, BindingError, CheckpointError
from vllm_backplane.gguf.architectures import named
from vllm_backplane.gguf.configuration import QUANTIZATION
from vllm_backplane.gguf.file import GgufFile
from vllm_backplane.gguf.folder import source
from vllm_backplane.gguf.lazy_tensor import weights
from vllm_backplane.gguf.model_files import Gguf


class GgufModelLoader(BaseModelLoader):
    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._read: list[GgufFile] = []

    def download_model(self, model_config: ModelConfig) -> None:
        """The file is on this host, or it would not have been described."""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> torch.nn.Module:
        try:
            return super().load_model(vllm_config, model_config, prefix)
        finally:
            # Most of it was packed; the embedding stays in the file, and few of its rows are read again.
            read, self._read = self._read, []
            for file in read if not host.is_locked() else []:
                file.forget_pages()

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        stated = getattr(model_config.hf_config, "quantization_config", None)
        if not isinstance(stated, dict) or stated.get("quant_method") != QUANTIZATION:
            raise BackplaneError(
                f"--load-format {QUANTIZATION} loads GGUF files, and {model_config.model} is none; remove the option"
            )
        # What is multiplied as blocks has no memory yet, and its layer insists on it; a tied head has nothing.
        wanted = {name for name, weight in model.named_parameters() if not weight.is_meta and weight.numel()}
        file, into = source(stated), cast(Any, model)
        self._read = file.files
        loaded = into.load_weights(_weights(file, bool(self.load_config.use_tqdm_on_load)))
        missing = sorted(wanted - loaded) if loaded is not None else []
        if missing:
            raise CheckpointError(
                f"{file.path} has no weights for {', '.join(missing[:4])}{' and others' * (len(missing) > 4)}; choose "
                "a complete file"
            )


def _weights(model: Gguf, shown: bool) -> Iterator[tuple[str, torch.Tensor]]:
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    everything = sum(placed.tensor.size for placed in model.tensors.values())
    with tqdm(
        total=everything,
        desc=f"Loading {model.path.name}",
        unit="B",
        unit_scale=True,
        disable=not (shown and first),
        mininterval=1,
    ) as bar:
        for one in named(model):
            yield from weights(one)
            bar.update(one.placed.tensor.size)


def register() -> None:
    """Make the load format known to vLLM, once per process."""
    try:
        present = get_model_loader(LoadConfig(load_format=QUANTIZATION))
    except ValueError:
        register_model_loader(QUANTIZATION)(GgufModelLoader)
        return
    if type(present) is not GgufModelLoader:
        raise BindingError(
            f"--load-format {QUANTIZATION} already belongs to {type(present).__module__}; uninstall one of the two "
            "plugins"
        )
