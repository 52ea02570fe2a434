"""Implements convolutions with other operators, as columns (im2col) and a matrix product.

PyTorch has convolution kernels for its built-in devices only and calls one operator, `convolution_overrideable`, for
every other device. So there is no CPU kernel that the driver could run behind a launch. Encoders of audio and images
begin with a convolution.
"""

from __future__ import annotations

from functools import cache

import torch

from vllm_backplane.errors import OperatorError


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> torch.Tensor:
    """Returns the convolution of one or two dimensions.

    x [batch, channels, (height,) width]; weight [channels out, channels / groups, (height,) width].
    """
    if transposed or x.dim() not in (3, 4):
        raise OperatorError(
            f"a{' transposed' if transposed else ''} convolution of {x.dim() - 2} dimensions is not supported: the "
            "simulated NPU has those of one and two dimensions that are not transposed; choose another device for this "
            "model"
        )
    if x.dim() == 3:
        wide = convolution(
            x.unsqueeze(2),
            weight.unsqueeze(2),
            bias,
            [1, *stride],
            [0, *padding],
            [1, *dilation],
            transposed,
            [0, *output_padding],
            groups,
        )
        return wide.squeeze(2)
    padded = torch.nn.functional.pad(x, (padding[1], padding[1], padding[0], padding[0])).contiguous()
    kernel = weight.shape[2:]
    height, width = (
        (padded.shape[2 + side] - dilation[side] * (kernel[side] - 1) - 1) // stride[side] + 1 for side in (0, 1)
    )
    image, channel, row, column = padded.stride()
    windows = padded.as_strided(
        (x.shape[0], x.shape[1], *kernel, height, width),
        (image, channel, row * dilation[0], column * dilation[1], row * stride[0], column * stride[1]),
    )
    columns = windows.reshape(x.shape[0], groups, -1, height * width)
    product = torch.matmul(weight.reshape(groups, weight.shape[0] // groups, -1), columns)
    result = product.reshape(x.shape[0], weight.shape[0], height, width)
    return result if bias is None else result + bias.view(-1, 1, 1)


@cache
def register(dispatch_key: str) -> torch.library.Library:
    """Registers the implementation. The cache keeps the library alive: PyTorch removes the implementation with it."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("convolution_overrideable", convolution, dispatch_key)
    return library
