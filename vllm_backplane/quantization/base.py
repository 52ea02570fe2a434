"""What vLLM asks of every quantization, and what all of ours answer alike."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    get_quantization_config,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_backplane.errors import BindingError


class BackplaneQuantizationConfig(QuantizationConfig):
    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # of CUDA's; there is none here

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []


def register(name: str, config: type[BackplaneQuantizationConfig]) -> None:
    """Make a name of --quantization known to vLLM, once per process."""
    if name not in QUANTIZATION_METHODS:
        register_quantization_config(name)(config)
        return
    found = get_quantization_config(name)
    if found is not config:
        raise BindingError(
            f"--quantization {name} already belongs to {found.__module__}; uninstall one of the two plugins, or "
            "install a vLLM that this version of vllm-backplane supports"
        )
