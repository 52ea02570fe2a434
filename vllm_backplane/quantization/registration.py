"""Registers quantization configurations and model loaders with vLLM under their names.

Each name is registered once per process. A name that another plugin has taken is an error: vLLM would let the later
registration replace the earlier one, and only log it.
"""

from __future__ import annotations

from typing import Any

from vllm.config.load import LoadConfig
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    get_quantization_config,
    register_quantization_config,
)
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from vllm_backplane.errors import BindingError
from vllm_backplane.quantization.base import BackplaneQuantizationConfig


def register_quantization(name: str, config: type[BackplaneQuantizationConfig]) -> None:
    """Registers a value of --quantization, unless it is registered already. Raises if it belongs to another plugin."""
    if name not in QUANTIZATION_METHODS:
        register_quantization_config(name)(config)
        return
    found = get_quantization_config(name)
    if found is not config:
        raise BindingError(
            f"--quantization {name} already belongs to {found.__module__}; uninstall one of the two plugins, or "
            "install a vLLM that this version of vllm-backplane supports"
        )


def register_loader(name: str, loader: type[BaseModelLoader], extra_config: dict[str, Any] | None = None) -> None:
    """Registers a value of --load-format, unless it is registered already. Raises if it belongs to another plugin.

    `extra_config` is a value of --model-loader-extra-config with which the class can be instantiated: vLLM returns the
    loader of a format only as an instance.
    """
    try:
        present = get_model_loader(LoadConfig(load_format=name, model_loader_extra_config=extra_config or {}))
    except ValueError:
        register_model_loader(name)(loader)
        return
    if type(present) is not loader:
        raise BindingError(
            f"--load-format {name} already belongs to {type(present).__module__}; uninstall one of the two plugins"
        )
