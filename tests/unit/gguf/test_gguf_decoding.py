"""Dequantization is bit-equal to that of the gguf package, and so are the weights packed for `quantized_linear`."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from vllm_backplane.device import CodeLayout
from vllm_backplane.errors import CheckpointError
from vllm_backplane.gguf.decoding import QUANTIZED_TYPES, SERVED, Type, dequantized, grouped, require_served_type
from vllm_backplane.gguf.file import GgufFile
from vllm_backplane.gguf.lazy_tensor import LazyTensor
from vllm_backplane.gguf.model_files import TensorLocation
from vllm_backplane.gguf.packing import mapped_rows, packed_rows, require_finite_blocks
from vllm_backplane.ops.quantized_linear import dequantized as from_packed

ROWS, BLOCKS = 7, 6
REAL = Path(__file__).with_name("smollm2-blocks.gguf")
"""Rows of a model, quantized by llama-quantize; see cut_blocks.py."""
CODE_LAYOUTS = (CodeLayout(4), CodeLayout(16), CodeLayout(16, signed=True))


def random_blocks(kind: Type, rows: int = ROWS, blocks: int = BLOCKS, seed: int = 0) -> np.ndarray:
    """Returns random bytes; infinite, NaN, subnormal and negative scales are among them."""
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks * gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)


def finite_blocks(kind: Type, rows: int) -> np.ndarray:
    """Returns random bytes in which blocks with scales or offsets that are not finite are zero."""
    raw = random_blocks(kind, rows=rows)
    blocks = raw.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    found = grouped(torch.from_numpy(blocks), kind)
    numbers = [one for one in (found.scales, found.offsets) if one is not None]
    blocks[~np.all([torch.isfinite(one).all(dim=1).numpy() for one in numbers], axis=0)] = 0
    return raw


def same_bits(found: torch.Tensor, expected: np.ndarray) -> bool:
    """Returns whether all values have equal bits; any two NaNs count as equal."""
    ours, theirs = found.numpy(), expected.astype(np.float32, copy=False)
    both_nan = np.isnan(ours) & np.isnan(theirs)
    return ours.shape == theirs.shape and bool(((ours.view(np.uint32) == theirs.view(np.uint32)) | both_nan).all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", SERVED, ids=lambda kind: kind.name)
def test_dequantization_is_bit_equal_to_the_gguf_package(kind: Type) -> None:
    for seed in range(20):
        raw = random_blocks(kind, seed=seed)
        assert same_bits(dequantized(torch.from_numpy(raw), kind), gguf.quants.dequantize(raw, kind)), seed


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", QUANTIZED_TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("layout", CODE_LAYOUTS)
def test_the_operators_form_holds_the_same_values(kind: Type, layout: CodeLayout) -> None:
    raw = finite_blocks(kind, rows=21)
    made = packed_rows([torch.from_numpy(raw)], kind, layout, chunk=1000)
    found = from_packed(made.codes, made.scales, made.offsets, QUANTIZED_TYPES[kind].bits)
    assert same_bits(found[:21], gguf.quants.dequantize(raw, kind))
    assert not made.scales[-1, :, 21 % layout.width :].any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", QUANTIZED_TYPES, ids=lambda kind: kind.name)
def test_blocks_that_are_not_finite_are_refused(kind: Type) -> None:
    """Tests one bad block of many: as packed rows, as values, and by its float16 numbers alone."""
    raw = finite_blocks(kind, rows=21)
    sizes = gguf.GGML_QUANT_SIZES[kind]
    raw[7, : sizes[1]] = 0xFF  # as scales and offsets, this is NaN
    rows = torch.from_numpy(raw)
    with pytest.raises(CheckpointError, match=f"a tensor of type {kind.name} in the GGUF file has NaN or infinite"):
        packed_rows([rows], kind, CodeLayout())
    with pytest.raises(CheckpointError, match="NaN or infinite values; download the file again"):
        LazyTensor(rows, kind, (21, raw.shape[1] // sizes[1] * sizes[0])).values()
    halves = QUANTIZED_TYPES[kind].halves
    for first in range(halves.start, halves.stop, 2):
        raw = finite_blocks(kind, rows=21)
        require_finite_blocks(torch.from_numpy(raw), kind)
        last = raw.shape[1] - sizes[1]
        raw[20, last + first : last + first + 2] = np.array([np.inf], np.float16).view(np.uint8)
        assert not np.isfinite(gguf.quants.dequantize(raw, kind)[20]).all()
        with pytest.raises(CheckpointError, match="NaN or infinite values; download the file again"):
            require_finite_blocks(torch.from_numpy(raw), kind)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_norm_that_is_not_finite_is_refused(value: float) -> None:
    numbers = torch.ones(64)
    norm = LazyTensor(numbers.view(torch.uint8).view(1, -1), Type.F32, (64,))
    assert norm.values().tolist() == [1.0] * 64
    numbers[63] = value
    with pytest.raises(CheckpointError, match="a tensor of type F32 in the GGUF file has NaN or infinite"):
        torch.zeros(64).copy_(norm)
    numbers.fill_(3e38)  # finite, although their sum is not
    assert norm.values().max() == torch.tensor(3e38)


@pytest.mark.parametrize("kind", [kind for kind in QUANTIZED_TYPES if kind != Type.Q4_1], ids=lambda kind: kind.name)
def test_what_llama_quantize_made_is_bit_equal(kind: Type) -> None:
    """Compares values both dequantized and packed for the operator; the gguf package's own reader gives the expected
    ones."""
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(REAL).tensors}[kind.name]
    assert theirs.tensor_type == kind
    expected = gguf.quants.dequantize(theirs.data, kind)
    assert np.isfinite(expected).all() and 0.01 < expected.std() < 1, "weights of a model"
    file = GgufFile(REAL)
    rows = mapped_rows(TensorLocation(file, file.tensors[kind.name]))
    assert same_bits(dequantized(rows, kind), expected)
    for layout in CODE_LAYOUTS:
        made = packed_rows([rows], kind, layout)
        assert same_bits(
            from_packed(made.codes, made.scales, made.offsets, QUANTIZED_TYPES[kind].bits)[: len(rows)], expected
        )


@pytest.mark.parametrize("kind", QUANTIZED_TYPES, ids=lambda kind: kind.name)
def test_codes_and_groups_match_the_layout(kind: Type) -> None:
    layout = QUANTIZED_TYPES[kind]
    found = grouped(torch.from_numpy(random_blocks(kind)), kind)
    assert found.codes.shape[-1] == layout.group and int(found.codes.max()) < 2**layout.bits
    assert found.codes.shape[1] * layout.group == BLOCKS * gguf.GGML_QUANT_SIZES[kind][0]
    half = kind.name.endswith(("_0", "_1", "_NL"))
    assert found.scales.dtype == (torch.float16 if half else torch.float32)


def test_other_types_are_refused_with_those_that_are_served() -> None:
    with pytest.raises(CheckpointError, match=r"the tensor x has the type IQ2_XXS.*Q4_0.*IQ4_NL.*BF16"):
        require_served_type(Type.IQ2_XXS, "the tensor x")


@pytest.mark.models
def test_a_real_file_is_dequantized_bit_equal() -> None:
    """Compares rows of every tensor of the default model with those that the gguf package's reader returns."""
    from vllm_backplane.gguf.model_files import open_model
    from vllm_backplane.models import obtain

    model = open_model(obtain("smollm2"))
    reader = gguf.GGUFReader(model.path)
    assert {tensor.name for tensor in reader.tensors} == model.tensors.keys()
    kinds = set()
    for tensor in reader.tensors:
        rows = tensor.data.reshape(-1, tensor.data.shape[-1])[-64:]
        expected = gguf.quants.dequantize(rows, tensor.tensor_type)
        location = model.tensors[tensor.name]
        assert same_bits(dequantized(mapped_rows(location)[-64:], location.tensor.type), expected), tensor.name
        kinds.add(location.tensor.type)
    assert Type.Q4_1 in kinds and Type.F32 in kinds


@pytest.mark.models
@pytest.mark.parametrize(
    "kind", [Type.Q4_0, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.F16, Type.BF16], ids=lambda k: k.name
)
def test_real_weights_in_a_file_of_each_type_are_dequantized_bit_equal(tmp_path: Path, kind: Type) -> None:
    """The gguf package quantizes the default model's weights; it cannot quantize to the other types."""
    from vllm_backplane.gguf.model_files import open_model
    from vllm_backplane.models import obtain

    names = ("token_embd.weight", "blk.0.attn_q.weight", "blk.14.ffn_down.weight", "blk.29.attn_output.weight")
    model, writer = open_model(obtain("smollm2")), gguf.GGUFWriter(tmp_path / "some.gguf", "llama")
    expected = {}
    for name in names:
        location = model.tensors[name]
        values = gguf.quants.dequantize(mapped_rows(location)[:512].numpy(), location.tensor.type)
        raw = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
        expected[name] = gguf.quants.dequantize(raw, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "some.gguf")
    for name in names:
        tensor = file.tensors[name]
        assert tensor.type == kind
        assert same_bits(dequantized(mapped_rows(TensorLocation(file, tensor)), kind), expected[name]), name
