"""Defines the base classes of Backplane's quantization methods and configurations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """Describes the sizes, type and attributes of a linear layer's weights, under the names of vLLM's `create_weights`.

    For an embedding, the outputs are the rows of the table and the inputs are its columns.
    """

    input_size_per_partition: int
    output_partition_sizes: list[int]
    """Outputs of each weight that the layer fuses, on this rank."""
    input_size: int
    output_size: int
    params_dtype: torch.dtype
    extra_attributes: Mapping[str, Any]
    """Attributes of the parameters; the layer's `weight_loader` is among them."""

    @property
    def output_size_per_partition(self) -> int:
        return sum(self.output_partition_sizes)

    @property
    def is_row_parallel(self) -> bool:
        """Returns whether the inputs are divided among ranks."""
        return self.input_size != self.input_size_per_partition

    def meta_weight(self) -> torch.Tensor:
        """Returns the full-precision weight of this rank, without memory."""
        shape = (self.output_size_per_partition, self.input_size_per_partition)
        return torch.empty(shape, dtype=self.params_dtype, device="meta")


class LinearQuantizationMethod(QuantizeMethodBase):
    """Creates the parameters of a quantized linear layer, LM head or embedding from `LinearWeights`."""

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        weights = LinearWeights(
            input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype, extra_weight_attrs
        )
        self.create_parameters(layer, weights)

    @abstractmethod
    def create_parameters(self, layer: torch.nn.Module, weights: LinearWeights) -> None:
        """Creates the layer's parameters, before anything is loaded."""


class AnyDeviceConfig:
    """Allows every device in a quantization configuration, because each device has the operator `quantized_linear`."""

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # a compute capability of CUDA, which Backplane's devices do not have


class BackplaneQuantizationConfig(AnyDeviceConfig, QuantizationConfig):
    @staticmethod
    def get_config_filenames() -> list[str]:
        return []
