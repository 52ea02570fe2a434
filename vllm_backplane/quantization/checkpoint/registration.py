"""Registers Backplane's configurations of quantized checkpoints with vLLM, in the place of vLLM's own.

vLLM's registry lets a plugin replace the class of an existing name. The classes registered here import the real one
when vLLM calls them: importing vLLM's formats takes a third of a second, which only a quantized checkpoint needs.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_backplane.errors import BackplaneError, CheckpointError, short_repr
from vllm_backplane.name_patterns import UnboundedPattern, ways
from vllm_backplane.quantization.base import BackplaneQuantizationConfig
from vllm_backplane.runtime import runtime

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
CONFIG_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    DeprecationWarning,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    re.error,
)
"""Errors that values of a quantization config can cause in vLLM. Lack of memory and failed imports are others."""
NAME_CHARACTERS, MOST_WAYS = 64, 1e6
"""Length of a layer's name, and the limit of all ways in which the patterns of a config can match one: milliseconds."""
_PACKAGE = "vllm_backplane.quantization.checkpoint"
CLASSES = {
    f"{_PACKAGE}.gptq:BackplaneGPTQConfig": ("auto_gptq", "gptq", "gptq_marlin"),
    f"{_PACKAGE}.awq:BackplaneAWQConfig": ("auto_awq", "awq", "awq_marlin"),
    f"{_PACKAGE}.compressed_tensors:BackplaneCompressedTensorsConfig": ("compressed-tensors",),
}
"""module:Class of each configuration, and vLLM's names for its format."""

NAMES = tuple(name for names in CLASSES.values() for name in names)

SUPPORTED = (
    "GPTQ with 4 or 8 bits (desc_act too)",
    "AWQ with 4 or 8 bits and zero points",
    "compressed-tensors W4A16 and W8A16 (pack-quantized)",
    "compressed-tensors W8A8-int8 (inputs per token, symmetric)",
    "GGUF",
)
"""Quantized checkpoints that run on every device: all of them use the operator `quantized_linear`, for which a device
has a kernel or uses the reference."""


def unsupported(what: str) -> CheckpointError:
    """Returns the error for a checkpoint that does not run here. It lists those that do."""
    return CheckpointError(
        f"{what} does not run on device {runtime().device.name!r}; choose a checkpoint of: {'; '.join(SUPPORTED)}; or "
        "one in full precision, with --quantization int8 or int4 to quantize it while it is loaded"
    )


def require_integers(format_name: str, **values: Any) -> None:
    """Raises CheckpointError unless the values of a checkpoint's quantization config are integers other than 0."""
    for name, value in values.items():
        if type(value) is not int or value == 0:
            raise CheckpointError(
                f"the quantization config of this {format_name} checkpoint has {short_repr(value)} for {name}, not an "
                "integer other than 0; download the checkpoint again"
            )


def require_usable_scales(scales: torch.Tensor, prefix: str) -> None:
    """Raises CheckpointError if a scale of a layer is NaN, infinite or larger than any float16 number. Weights of that
    size cannot be meant, and outputs would be NaN."""
    if not bool((scales.abs() <= torch.finfo(torch.float16).max).all()):
        raise CheckpointError(
            f"the scales of {prefix} have NaN, infinite or very large values; download the checkpoint again"
        )


def names_config_faults(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorates a function in which vLLM reads a checkpoint's quantization config. vLLM expects the values to be sound:
    an error that a value of another type or size can cause becomes a CheckpointError."""

    @wraps(function)
    def read(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except CONFIG_FAULTS as fault:
            if isinstance(fault, BackplaneError):
                raise
            raise CheckpointError(
                f"the quantization config of this checkpoint cannot be used ({type(fault).__name__}: {fault}); choose "
                "another checkpoint, or download it again"
            ) from fault

    return read


@names_config_faults
def _from_config(config_class: type[QuantizationConfig], config: dict[str, Any]) -> QuantizationConfig:
    return config_class.from_config(config)


def require_simple_patterns(config: dict[str, Any]) -> None:
    """Raises CheckpointError if patterns of layer names in a quantization config could take very long to match."""
    total = 0.0
    for text in _patterns(config):
        try:
            total += ways(text, NAME_CHARACTERS)
        except UnboundedPattern as fault:
            raise CheckpointError(
                f"the quantization config of this checkpoint has the pattern {short_repr(text)}, whose matching has no "
                f"bound: {fault}; choose another checkpoint"
            ) from None
        if total > MOST_WAYS:
            raise CheckpointError(
                f"the patterns in the quantization config of this checkpoint, up to {short_repr(text)}, may take very "
                "long to match; choose another checkpoint"
            )


def _patterns(config: dict[str, Any]) -> Iterator[str]:
    """Yields the patterns of layer names: texts that begin with `re:`, and the keys of GPTQ's dynamic rules."""
    rules = config.get("dynamic")
    yield from (str(key).removeprefix("+:").removeprefix("-:") for key in (rules if isinstance(rules, dict) else {}))
    left: list[Any] = [config]
    while left:
        one = left.pop()
        if isinstance(one, str) and one.startswith("re:"):
            yield one.removeprefix("re:")
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list):
            left += one


class LazyConfig(BackplaneQuantizationConfig):
    """Takes the place of a configuration class that is imported on first use."""

    path: ClassVar[str]
    name: ClassVar[str]

    @classmethod
    def config_class(cls) -> type[QuantizationConfig]:
        module, _, name = cls.path.partition(":")
        found: type[QuantizationConfig] = getattr(importlib.import_module(module), name)
        return found

    @classmethod
    def get_name(cls) -> Any:  # vLLM's type lists its own names
        return cls.name

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        require_simple_patterns(config)
        return _from_config(cls.config_class(), config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        return cls.config_class().override_quantization_method(hf_quant_cfg, user_quant, hf_config=hf_config)

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return cls.config_class().get_config_filenames()

    def get_quant_method(self, layer: Any, prefix: str) -> None:
        raise NotImplementedError("vLLM calls get_quant_method on the object that from_config returns")


@cache
def register() -> None:
    """Registers the configurations with vLLM, once per process."""
    for path, names in CLASSES.items():
        lazy = type(f"LazyConfig_{names[0]}", (LazyConfig,), {"path": path, "name": names[0]})
        for name in names:
            register_quantization_config(name)(lazy)
