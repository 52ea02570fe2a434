"""Tests what the benchmark of rounded inputs leaves exact, and its samples and figures, with small inputs."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.input_rounding import (
    Model,
    batches,
    bounded,
    chosen_columns,
    first_position,
    largest_columns,
    largest_values,
    measured,
    rounded,
    rounded_except,
    variants_of,
)
from benchmarks.perplexity import Part, whole


def parts(*lengths: int) -> list[Part]:
    return [whole(list(range(1, length + 1))) for length in lengths]


def test_groups_are_rounded_by_their_own_scales() -> None:
    x = torch.tensor([[[127.0, 3.4, 0.0, 0.2, 1.27, 0.0149]]])
    expected = [127, 3, 0, 0, 1.27, 0.01]
    # The last group has 2 of 4 columns.
    assert rounded(x, 4).flatten().tolist() == pytest.approx(expected)
    assert rounded(x, 0)[..., 4].item() == 1, "one scale for the row"


def test_what_is_exact_does_not_set_the_scale() -> None:
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
    x[..., 5] *= 100
    plain = rounded(x, 32)
    exact = rounded_except(x, chosen_columns(x, torch.tensor([5])), 32)
    others = torch.arange(64) != 5
    assert torch.equal(exact[..., 5], x[..., 5])
    assert (exact - x)[..., others].abs().max() < 0.1 * (plain - x)[..., others].abs().max()
    assert torch.equal(exact[..., 32:], plain[..., 32:]), "another group"


def test_masks() -> None:
    x = torch.tensor([[[1.0, -9.0, 3.0], [7.0, 0.0, -8.0]], [[4.0, 5.0, 6.0], [-3.0, 2.0, 1.0]]])
    assert first_position(x).int().tolist() == [[[1, 1, 1], [0, 0, 0]]] * 2
    assert chosen_columns(x, torch.tensor([2, 0])).int().tolist() == [[[1, 0, 1]] * 2] * 2
    assert largest_values(x, 1).int().tolist() == [[[0, 1, 0], [0, 0, 1]], [[0, 0, 1], [1, 0, 0]]]
    assert largest_values(x, 5).all(), "a row has only three"


def test_columns_are_ranked_against_the_median() -> None:
    found = largest_columns(torch.tensor([2.0, 1.0, 20.0, 2.0, 8.0]), 2)
    assert found == ([2, 4], [10.0, 4.0])
    assert len(largest_columns(torch.ones(3), 9).columns) == 3


def test_a_sample_is_bounded_by_the_tokens_that_count() -> None:
    assert bounded(parts(5, 5, 5), 8) == parts(5, 5)
    assert bounded(parts(5, 5, 5), 7) == parts(5)
    assert bounded(parts(5, 5), 1) == parts(5), "never empty"
    assert bounded([], 8) == []


def test_batches_are_bounded_with_what_fills_them() -> None:
    given = parts(4, 16, 3, 9, 40, 4)
    found = list(batches(given, 16))
    assert [[len(part.tokens) for part in batch] for batch in found] == [[3, 4, 4], [9], [16], [40]]
    assert sorted(map(str, given)) == sorted(str(part) for batch in found for part in batch)


def test_figures_of_a_variant() -> None:
    found = measured([-1.0, -2.0], [-1.2, -2.2], [0.1, 0.3])
    assert found.change == pytest.approx(math.exp(0.2) - 1)
    assert found.error == pytest.approx(0, abs=1e-12)
    assert (found.divergence, found.divergence_error) == pytest.approx((0.2, 0.1))


def test_variants_take_the_columns_of_their_input() -> None:
    x = torch.randn(2, 2, 32, generator=torch.Generator().manual_seed(2))
    variants = variants_of({"layer": [7, 3, 1]}, [1, 2], 32)
    assert list(variants) == [
        "all rounded", "position 0 exact",
        "1 columns exact", "1 values exact", "2 columns exact", "2 values exact",
    ]  # fmt: skip
    assert torch.equal(variants["all rounded"]("layer", x), rounded(x, 32))
    assert torch.equal(variants["position 0 exact"]("layer", x)[:, 0], x[:, 0])
    assert torch.equal(variants["2 columns exact"]("layer", x)[..., [3, 7]], x[..., [3, 7]])
    assert not torch.equal(variants["1 columns exact"]("layer", x)[..., 3], x[..., 3])


@pytest.mark.slow
def test_the_model_reads_changed_inputs_whatever_fills_a_batch() -> None:
    """Runs a random Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50}
    model = Model(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)))
    given = [Part([1, 2, 3, 4, 5, 6], range(2, 5)), whole([9, 8, 7])]
    plain = model.predictions(given, None)
    assert plain.shape == (3 + 2, 50)
    alone = torch.cat([model.predictions([part], None) for part in given])
    torch.testing.assert_close(plain, alone)

    seen: list[str] = []

    def zeros(name: str, x: torch.Tensor) -> torch.Tensor:
        seen.append(name)
        return torch.zeros_like(x)

    assert torch.allclose(model.predictions(given, zeros), torch.full((5, 50), -math.log(50)))
    layer = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"]
    assert seen == [f"layers.{at}.{name}" for at in (0, 1) for name in layer] + ["lm_head"]
    change = (model.predictions(given, lambda name, x: rounded(x, 32)) - plain).abs().max()
    assert 0 < change < 0.1
    assert torch.equal(model.predictions(given, None), plain), "the next run is not changed"
    magnitudes = model.magnitudes(given)
    assert list(magnitudes) == seen and magnitudes["layers.0.mlp.down_proj"].shape == (96,)
