"""Implements `--quantization int8` and `int4`, which quantize the weights of a full-precision checkpoint while they are
loaded.
"""

from __future__ import annotations
