"""Provides GGUF's tensor types and the sizes of their blocks, which the library `gguf` defines.

Only its module of constants is loaded. The whole library also imports writers, tokenizers and their dependencies, which
takes longer than reading a model's file.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING


def _constants() -> ModuleType:
    if "gguf" in sys.modules:
        from gguf import constants

        return constants
    package = find_spec("gguf")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'gguf'", name="gguf")
    spec = spec_from_file_location(f"{__name__}._constants", Path(package.origin).with_name("constants.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
else:
    _loaded = _constants()
    GGML_QUANT_SIZES, GGMLQuantizationType = _loaded.GGML_QUANT_SIZES, _loaded.GGMLQuantizationType

__all__ = ["GGML_QUANT_SIZES", "GGMLQuantizationType"]
