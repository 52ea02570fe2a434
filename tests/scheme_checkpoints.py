"""Makes the tensors of GPTQ, AWQ and compressed-tensors layers, and the weights that they encode, for tests.

The tensors are packed code by code from the formats' definitions, without Backplane's own code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

AWQ_COLUMNS = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
"""The column, of eight (four), whose code is at each position of an AWQ word, from the lowest bits."""


@dataclass(frozen=True)
class Stored:
    """Holds a layer as a checkpoint stores it, and its weight."""

    tensors: dict[str, torch.Tensor]
    """Tensors by the last part of their names."""
    weight: torch.Tensor
    """The encoded weight, float64 [outputs, inputs]."""


def packed(codes: np.ndarray, bits: int, columns: tuple[int, ...] = ()) -> torch.Tensor:
    """Packs codes along the last dimension, the first code in the lowest bits, or in the order of `columns`."""
    per_word = 32 // bits
    words = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // per_word)), dtype=np.uint32)
    for word in range(words.shape[-1]):
        for place in range(per_word):
            column = word * per_word + (columns[place] if columns else place)
            if column < codes.shape[-1]:
                words[..., word] |= codes[..., column].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32).copy())


def _drawn(
    inputs: int, outputs: int, bits: int, groups: int, seed: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns random codes [outputs, inputs], zero points and float16 scales [outputs, groups]."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 2**bits, (outputs, inputs), dtype=np.uint8)
    zeros = random.integers(1, 2**bits, (outputs, groups), dtype=np.uint8)
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    # Weights are about inputs ** -0.5, so outputs are about as large as inputs.
    scales = (random.uniform(0.5, 1.5, (outputs, groups)) * 3.4 / 2**bits * inputs**-0.5).astype(np.float16)
    return codes, zeros, scales


def gptq(
    inputs: int, outputs: int, bits: int, group: int, *, seed: int = 0, symmetric: bool = True, by_activation: int = 0
) -> Stored:
    """Makes a GPTQ layer. `by_activation` is the seed of a random activation order; 0 for none."""
    size = inputs if group == -1 else group
    codes, zeros, scales = _drawn(inputs, outputs, bits, inputs // size, seed, symmetric)
    group_of = np.arange(inputs) // size
    if by_activation:
        group_of = np.random.default_rng(by_activation).permutation(group_of)
    weight = np.empty((outputs, inputs))
    for column in range(inputs):
        one = group_of[column]
        weight[:, column] = scales[:, one].astype(np.float64) * (
            codes[:, column].astype(np.float64) - zeros[:, one].astype(np.float64)
        )
    tensors = {
        "qweight": packed(codes, bits).t().contiguous(),
        "qzeros": packed((zeros - 1).T, bits),  # this format stores zero points minus one
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }
    return Stored(tensors, torch.from_numpy(weight))


def awq(inputs: int, outputs: int, bits: int, group: int, *, seed: int = 0) -> Stored:
    """Makes an AWQ layer with zero points."""
    codes, zeros, scales = _drawn(inputs, outputs, bits, inputs // group, seed, symmetric=False)
    by_input = [np.repeat(each.astype(np.float64), group, axis=1) for each in (scales, zeros)]
    tensors = {
        "qweight": packed(codes.T, bits, AWQ_COLUMNS[bits]),
        "qzeros": packed(zeros.T, bits, AWQ_COLUMNS[bits]),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return Stored(tensors, torch.from_numpy(by_input[0] * (codes.astype(np.float64) - by_input[1])))


def pack_quantized(
    inputs: int, outputs: int, bits: int, group: int, *, seed: int = 0, symmetric: bool = True
) -> Stored:
    """Makes a compressed-tensors layer, W4A16 or W8A16; group -1 is one scale per output."""
    size = inputs if group == -1 else group
    codes, zeros, scales = _drawn(inputs, outputs, bits, inputs // size, seed, symmetric)
    by_input = [np.repeat(each.astype(np.float64), size, axis=1) for each in (scales, zeros)]
    tensors = {
        "weight_packed": packed(codes, bits),
        "weight_scale": torch.from_numpy(scales).bfloat16(),
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    by_input[0] = tensors["weight_scale"].double().repeat_interleave(size, 1).numpy()
    if not symmetric:
        tensors["weight_zero_point"] = packed(zeros.T, bits).t().contiguous()
    return Stored(tensors, torch.from_numpy(by_input[0] * (codes.astype(np.float64) - by_input[1])))


def int_quantized(inputs: int, outputs: int, *, seed: int = 0, by_output: bool = True) -> Stored:
    """Makes a compressed-tensors W8A8 layer, with one scale per output or one scale in all."""
    random = np.random.default_rng(seed)
    codes = random.integers(-128, 128, (outputs, inputs), dtype=np.int8)
    scales = (random.uniform(0.5, 1.5, (outputs, 1)) / 74 * inputs**-0.5).astype(np.float32)
    if not by_output:
        scales = scales[:1]
    tensors = {
        "weight": torch.from_numpy(codes),
        "weight_scale": torch.from_numpy(scales if by_output else scales[0]),
    }
    return Stored(tensors, torch.from_numpy(codes.astype(np.float64) * scales.astype(np.float64)))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def compressed(bits: int, group: int, *, symmetric: bool = True, **more: object) -> dict[str, object]:
    """Returns the quantization config of compressed-tensors W4A16 or W8A16; group -1 is one scale per output."""
    weights: dict[str, object] = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False, **more}
    weights |= {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    return _described("pack-quantized", weights, None)


def compressed_int8(*, by_output: bool = True, **inputs: object) -> dict[str, object]:
    """Returns the quantization config of compressed-tensors W8A8. `inputs` are changes to its activation settings."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
    weights["strategy"] = "channel" if by_output else "tensor"  # type: ignore[assignment]
    rounded = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token", **inputs}
    return _described("int-quantized", weights, rounded)


def _described(layout: str, weights: object, inputs: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }
