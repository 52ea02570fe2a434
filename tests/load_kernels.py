"""Loads the kernels of an installed wheel into PyTorch, without vLLM, and fails if one is missing."""

from importlib.util import find_spec
from pathlib import Path

import torch

spec = find_spec("vllm_backplane")
assert spec is not None and spec.origin is not None, "vllm-backplane is not installed"
for name in ("cpu/libbackplane_cpu.so", "sim/libbackplane_sim.so"):
    torch.ops.load_library(str(Path(spec.origin).parent / "devices" / name))
    print(f"loaded {name}")
