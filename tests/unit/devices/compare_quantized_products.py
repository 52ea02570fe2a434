"""Compares the C++ kernels of quantized_linear with integer and float64 arithmetic; test_cpu_quantized.py runs it.

python compare_quantized_products.py     # prints the differences with each dot-product kernel of the machine, as JSON
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator

import numpy
import pytest
import torch

from vllm_backplane import ops
from vllm_backplane.device import CodeLayout
from vllm_backplane.devices.cpu import native
from vllm_backplane.errors import DeviceUnavailable
from vllm_backplane.ops.quantized_linear import packed_codes

NAN, INF = float("nan"), float("inf")
generator = torch.Generator().manual_seed(5)


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=generator)


class Weight:
    """Holds codes [features, positions] and scales and offsets [features, groups], also in the operator's layout."""

    def __init__(
        self, bits: int, out: int, fan_in: int, group: int, offsets: bool, layout: CodeLayout, dtype: torch.dtype
    ):
        step = group or 8
        self.bits, self.out, self.fan_in = bits, out, fan_in
        self.padded = -(-fan_in // step) * step
        self.group = group or self.padded
        groups = self.padded // self.group
        self.codes = integers(0, 2**bits, out, self.padded).to(torch.uint8)
        unit = fan_in**-0.5 / 2 ** (bits - 1)
        self.scales = (torch.randn(out, groups, generator=generator) * unit).to(dtype)
        self.offsets = (torch.randn(out, groups, generator=generator) * unit * 2 ** (bits - 1)).to(dtype)
        self.symmetric, self.layout = not offsets, layout

    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int, int]:
        width = self.layout.width

        def by_block(values: torch.Tensor) -> torch.Tensor:
            blocks = -(-self.out // width)
            # The padding of the last block must not affect results, so it is NaN.
            filling = torch.full((blocks * width - self.out, values.shape[1]), NAN, dtype=values.dtype)
            return torch.cat((values, filling)).view(blocks, width, -1).transpose(1, 2).contiguous()

        codes = packed_codes(self.codes, self.bits, self.layout)
        offsets = None if self.symmetric else by_block(self.offsets)
        return codes, by_block(self.scales), offsets, self.bits, self.out

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Returns the result in float64, and the sum of the terms' magnitudes."""
        if 0 < native.dequantizing_rows(self.bits) <= x.shape[0]:
            return self.decoded_product(x, bias)
        rows, groups = x.shape[0], self.padded // self.group
        values = numpy.zeros((rows, self.padded), numpy.float32)
        values[:, : x.shape[1]] = x.float().numpy()
        values = values.reshape(rows, groups, self.group)
        with numpy.errstate(all="ignore"):
            amax = numpy.abs(values).max(-1, keepdims=True)
            inverse = numpy.where(amax < 2.0**-100, numpy.float32(0), numpy.float32(127) / amax)
            codes = numpy.nan_to_num(numpy.rint(values * inverse)).clip(-127, 127).astype(numpy.int64)
            x_scales = (amax / numpy.float32(127))[..., 0].astype(numpy.float64)
        x_scales[~numpy.isfinite(values).all((1, 2))] = NAN
        weight = self.codes.numpy().astype(numpy.int64).reshape(self.out, groups, self.group)
        weight = weight - (2 ** (self.bits - 1) if self.symmetric else 0)
        dots = numpy.einsum("rgi,ogi->rog", codes, weight)
        sums = codes.sum(-1)[:, None]
        terms = self.scales.double().numpy() * dots * x_scales[:, None]
        if not self.symmetric:
            terms = terms + self.offsets.double().numpy() * sums * x_scales[:, None]
        # The magnitude before any cancellation: kernels may sum in parts, with or without 128 subtracted from codes.
        largest = numpy.maximum(self.codes.numpy(), 2 ** (self.bits - 1)).astype(numpy.int64)
        reached = numpy.einsum("rgi,ogi->rog", abs(codes), largest.reshape(weight.shape))
        sizes = numpy.abs(self.scales.double().numpy() * reached * x_scales[:, None])
        sizes = sizes + (0 if self.symmetric else numpy.abs(self.offsets.double().numpy() * sums * x_scales[:, None]))
        extra = 0.0 if bias is None else bias.double().numpy()
        return terms.sum(-1) + extra, sizes.sum(-1) + numpy.abs(extra)

    def decoded_product(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Returns the same for weight and input rounded to bfloat16."""
        by_group = self.codes.double().view(self.out, -1, self.group)
        scales = self.scales.double().unsqueeze(-1)
        if self.symmetric:
            weight = (by_group - 2 ** (self.bits - 1)) * scales
        else:
            weight = by_group * scales + self.offsets.double().unsqueeze(-1)
        weight = weight.view(self.out, -1)[:, : x.shape[1]].float().bfloat16().double()
        values = x.float().bfloat16().double()
        values[~x.float().isfinite().all(-1)] = NAN
        extra = 0.0 if bias is None else bias.double().numpy()
        # Ten times the tolerance of compare(), because all sums over positions are in float32.
        size = 10 * (values.abs() @ weight.abs().T).numpy()
        return (values @ weight.T).numpy() + extra, size + numpy.abs(extra)


def compare(weight: Weight, x: torch.Tensor, bias: torch.Tensor | None, label: str) -> Iterator[str]:
    got = ops.quantized_linear(x, *weight.arguments(), bias)
    expected, size = weight.product(x, bias)
    rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[x.dtype]
    label = (
        f"{label}: {tuple(x.shape)} {x.dtype} x {weight.out}, {weight.bits} bits, groups of {weight.group}, "
        f"symmetric {weight.symmetric}, {weight.scales.dtype}"
    )
    if got.shape != (x.shape[0], weight.out) or got.dtype != x.dtype:
        yield f"{label}: result is {tuple(got.shape)} {got.dtype}"
        return
    answer = got.double().numpy()
    if (numpy.isnan(answer) != numpy.isnan(expected)).any():
        yield f"{label}: NaN in {int(numpy.isnan(answer).sum())} places, not in {int(numpy.isnan(expected).sum())}"
        return
    # float32 sums with one term per group, then one rounding to the dtype of the result.
    allowed = size * 5e-7 + numpy.abs(expected) * rounding * 1.001 + 1e-7
    wrong = numpy.abs(answer - expected) > allowed
    wrong &= ~numpy.isnan(expected)
    if wrong.any():
        row, column = numpy.argwhere(wrong)[0]
        yield f"{label}: [{row}, {column}] is {answer[row, column]}, not {expected[row, column]}"


def shapes(layout: CodeLayout) -> Iterator[str]:
    floats = (torch.float32, torch.bfloat16, torch.float16)
    layers = ((8, 1, 8), (40, 9, 8), (32, 16, 32), (33, 65, 32), (100, 31, 64), (130, 33, 128), (72, 20, 24),
              (52, 20, 0), (577, 70, 0), (576, 96, 32), (3000, 40, 0), (4100, 35, 32))  # fmt: skip
    heights = (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 17, 31, 32, 33, 48, 65, 150)
    for index, ((fan_in, out, group), bits, offsets) in enumerate(itertools.product(layers, (8, 4), (False, True))):
        for height_index, rows in enumerate(heights):
            if fan_in > 1000 and rows not in (1, 7, 33, 150):
                continue
            dtype, scale_type = floats[(index + height_index) % 3], floats[(index // 2 + height_index) % 3]
            # Kernels may have a code path for half-precision scales; these sizes need several chunks.
            for numbers in {scale_type, torch.float16} if fan_in > 4000 and rows > 1 else {scale_type}:
                weight = Weight(bits, out, fan_in, group, offsets, layout, numbers)
                x = torch.randn(rows, fan_in, generator=generator).to(dtype)
                bias = torch.randn(out, generator=generator).to(dtype) if height_index % 2 else None
                yield from compare(weight, x, bias, "shapes")


def extremes(layout: CodeLayout) -> Iterator[str]:
    for bits, offsets, group, rows in itertools.product((8, 4), (False, True), (32, 0), (1, 5, 40, 100)):
        weight = Weight(bits, 50, 4096, group, offsets, layout, torch.float16 if rows == 40 else torch.float32)
        weight.codes = (integers(0, 2, 50, 4096) * (2**bits - 1)).to(torch.uint8)
        x = (integers(0, 2, rows, 4096) * 2 - 1).float() * 1e30
        yield from compare(weight, x, None, "codes and input at their ends")
        for code in (0, 2**bits - 1):
            weight.codes.fill_(code)
            yield from compare(weight, x.abs(), None, f"all codes {code}")
            yield from compare(weight, -x.abs(), None, f"all codes {code}, negative input")
        yield from compare(weight, x * 0, torch.ones(50), "zeros")
        yield from compare(weight, x * 1e-60, None, "input below what counts")
        mixed = torch.randn(rows, 4096, generator=generator) * torch.exp2(integers(-90, 60, rows, 4096).float())
        mixed[:, :64] = 0
        yield from compare(weight, mixed, None, "input of all sizes")


def not_finite(layout: CodeLayout) -> Iterator[str]:
    kinds = itertools.product((8, 4), (False, True), (32, 0))
    for (bits, offsets, group), rows, fault in itertools.product(kinds, (2, 3, 8, 40, 110), (NAN, INF, -INF)):
        weight = Weight(bits, 37, 200, group, offsets, layout, torch.float16)
        x = torch.randn(rows, 200, generator=generator)
        clean = ops.quantized_linear(x, *weight.arguments())
        x[rows // 2, 199] = fault
        got = ops.quantized_linear(x, *weight.arguments())
        others = [row for row in range(rows) if row != rows // 2]
        if not got[rows // 2].isnan().all():
            yield f"{bits} bits, offsets {offsets}, {rows} rows: {fault} in the input is not seen in the result"
        if not torch.equal(got[others], clean[others]):
            yield f"{bits} bits, offsets {offsets}, {rows} rows: {fault} in one row changes others"


def layouts(layout: CodeLayout) -> Iterator[str]:
    weight = Weight(4, 45, 96, 32, True, layout, torch.float16)
    codes, scales, offsets, bits, out = weight.arguments()
    x = torch.randn(6, 96, generator=generator)
    expected = ops.quantized_linear(x, codes, scales, offsets, bits, out)
    for name, got in {
        "three dimensions": ops.quantized_linear(x.view(2, 3, 96), codes, scales, offsets, bits, out).view(6, 45),
        "every second row": ops.quantized_linear(x.repeat_interleave(2, 0)[::2], codes, scales, offsets, bits, out),
        "by columns": ops.quantized_linear(x.t().contiguous().t(), codes, scales, offsets, bits, out),
        "codes apart": ops.quantized_linear(x, codes.repeat(1, 1, 1, 2)[..., :4], scales, offsets, bits, out),
        "one row": torch.stack([ops.quantized_linear(row, codes, scales, offsets, bits, out) for row in x]),
    }.items():
        if got.shape != expected.shape or not torch.allclose(got, expected, rtol=1e-5, atol=1e-6):
            yield f"{name}: differs"
    if ops.quantized_linear(x[:0], codes, scales, offsets, bits, out).shape != (0, 45):
        yield "no rows: wrong shape"
    if ops.quantized_linear(x, codes, scales, offsets, bits, 0).shape != (6, 0):
        yield "no features: wrong shape"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow
        for width, signed in itertools.product((1, 3, 8, layout.width, 64), (False, True)):
            other = CodeLayout(width, signed)
            for bits in (4, 8):
                weight = Weight(bits, 45, 96, 32, True, other, torch.float16)
                yield from compare(weight, x, None, f"{other}")


def threads(layout: CodeLayout) -> Iterator[str]:
    for rows in (1, 40, 130):
        weight = Weight(8, 300, 2000, 0, False, layout, torch.float16)
        x = torch.randn(rows, 2000, generator=generator)
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(ops.quantized_linear(x, *weight.arguments()))
        torch.set_num_threads(1)
        if not all(torch.equal(results[0], other) for other in results):
            yield f"{rows} rows: the result depends on the number of threads"


def rows_alone(layout: CodeLayout) -> Iterator[str]:
    """Yields an error for each number of rows whose results differ from those among 40 rows. A step may be padded with
    other rows, and its tokens must not change. Tiles round their sums differently, and the matrix instruction of
    ARMv8.6 adds offsets in another order, so these kernels are left out."""
    if native.dot_kernel() == "amx":
        return
    for (fan_in, group), bits, offsets in itertools.product(((256, 32), (576, 64), (4096, 32)), (8, 4), (False, True)):
        if offsets and native.dot_kernel() == "i8mm":
            continue
        weight = Weight(bits, 50, fan_in, group, offsets, layout, torch.float16)
        x = torch.randn(40, fan_in, generator=generator)
        together = ops.quantized_linear(x, *weight.arguments())
        for rows in (*range(1, 10), 13, 16, 17, 33):
            if not torch.equal(ops.quantized_linear(x[:rows].contiguous(), *weight.arguments()), together[:rows]):
                yield f"{fan_in}, groups of {group}, {bits} bits, offsets {offsets}: {rows} rows are not as among 40"


def refusals(layout: CodeLayout) -> Iterator[str]:
    codes, scales, offsets, _, out = Weight(8, 40, 64, 32, True, layout, torch.float16).arguments()
    assert offsets is not None
    x = torch.randn(2, 64)
    wrong = (
        ((x, codes, scales, None, 3, out), "3 bits"),
        ((x, codes.view(torch.int8).repeat(1, 2, 1, 1), scales, None, 4, out), "belong together"),
        ((x, codes.short(), scales, None, 8, out), "belong together"),
        ((x, codes, scales[:1], None, 8, out), "belong together" if len(scales) > 1 else "cannot give"),
        ((x, codes, scales[:, :1].repeat(1, 3, 1), None, 8, out), "3 groups"),
        ((x, codes, scales, offsets[:, :1], 8, out), "offsets"),
        ((x, codes, scales, None, 8, 10_000), "cannot give 10000"),
        ((torch.randn(2, 65), codes, scales, None, 8, out), "does not fit"),
        ((x.double(), codes, scales, None, 8, out), "Double"),
        ((x, codes, scales, None, 8, out, torch.ones(3)), "bias"),
    )
    for arguments, message in wrong:
        try:
            ops.quantized_linear(*arguments)
        except RuntimeError as error:
            if message not in str(error):
                yield f"the error is {error}, not {message!r}"
        else:
            yield f"accepted what should have been refused with {message!r}"


PARTS = (shapes, extremes, not_finite, layouts, threads, rows_alone, refusals)


def main() -> None:
    fault = native.fault()
    assert fault is None, fault
    for unknown in ("avx1024", "AMX", "amx,avx2"):
        with pytest.raises(DeviceUnavailable, match="use one of: "):
            native.use_dot_kernel(unknown)
    found = {}
    for name in native.available_dot_kernels():
        native.use_dot_kernel(name)
        assert native.dot_kernel() == name
        generator.manual_seed(5)
        layout = native.quantized_layout()
        assert layout is not None
        found[name] = {part.__name__: list(itertools.islice(part(layout), 20)) for part in PARTS}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
