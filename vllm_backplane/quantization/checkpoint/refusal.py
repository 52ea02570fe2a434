"""What of these checkpoints is served, said where something else is refused."""

from __future__ import annotations

import torch

from vllm_backplane.errors import CheckpointError
from vllm_backplane.runtime import runtime

SERVED = (
    "GPTQ with 4 or 8 bits (desc_act too)",
    "AWQ with 4 or 8 bits and zero points",
    "compressed-tensors W4A16 and W8A16 (pack-quantized)",
    "compressed-tensors W8A8-int8 (inputs per token, symmetric)",
    "GGUF",
)
"""On every device: all of them are products of `quantized_linear`, which a device has by a kernel of its own or by the
reference."""


def act_dtypes() -> list[torch.dtype]:
    """Types in which the rest of the model may be: all that the operators know."""
    return [torch.float32, torch.float16, torch.bfloat16]


def refused(what: str) -> CheckpointError:
    return CheckpointError(
        f"{what} does not run on device {runtime().device.name!r}; choose a checkpoint of: {'; '.join(SERVED)}; or one "
        "in full precision, with --quantization int8 or int4 to quantize it at loading"
    )
