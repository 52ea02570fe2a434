"""What vLLM asks of every quantization, and what all of ours answer alike."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig


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
