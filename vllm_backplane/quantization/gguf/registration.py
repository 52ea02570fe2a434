"""Registers the quantization and the load format `gguf` with vLLM."""

from __future__ import annotations

from vllm_backplane.gguf.hf_config import QUANTIZATION
from vllm_backplane.quantization.gguf.config import GgufConfig
from vllm_backplane.quantization.gguf.loader import GgufModelLoader
from vllm_backplane.quantization.registration import register_loader, register_quantization


def register() -> None:
    """Registers both names, unless they are registered already.

    Plugins are loaded in any order, and the last one to register a name wins. This function is therefore called again
    when a model turns out to be a GGUF file (`patches/platform/patch_gguf_model.py`, `config/stages.py`): it then
    raises BindingError if another plugin has taken a name since.
    """
    register_quantization(QUANTIZATION, GgufConfig)
    register_loader(QUANTIZATION, GgufModelLoader)
