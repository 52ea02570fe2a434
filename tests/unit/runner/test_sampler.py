"""Tests that the sampler gives exactly the tokens of vLLM's own PyTorch path, with and without seeds."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import LogitsProcessors, MinPLogitsProcessor, build_logitsprocs
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from vllm_backplane.errors import BindingError
from vllm_backplane.runner.sampler import BackplaneMinPLogitsProcessor, BackplaneSampler, replace_sampler

CPU = torch.device("cpu")
BATCH, VOCABULARY = 8, 300


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return VllmConfig()


def upstream(mode: str = "raw_logprobs", fp64: bool = False) -> Sampler:
    sampler = Sampler(mode, fp64)
    # The path that any platform can take, whichever platform these tests run on.
    sampler.topk_topp_sampler.forward = sampler.topk_topp_sampler.forward_native
    return sampler


def metadata(**changes: Any) -> SamplingMetadata:
    values: dict[str, Any] = {
        "temperature": torch.full((BATCH,), 0.8),
        "all_greedy": False,
        "all_random": True,
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": torch.zeros(BATCH),
        "presence_penalties": torch.zeros(BATCH),
        "repetition_penalties": torch.ones(BATCH),
        "output_token_ids": [[] for _ in range(BATCH)],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    return SamplingMetadata(**(values | changes))


def seeded(*rows: int) -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(100 + row) for row in rows}


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(BATCH, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3


def penalties() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    return {
        "no_penalties": False,
        "prompt_token_ids": torch.randint(0, VOCABULARY + 1, (BATCH, 20), generator=generator),
        "output_token_ids": [[row, row, 3, -1][:row] for row in range(BATCH)],
        "frequency_penalties": torch.rand(BATCH, generator=generator),
        "presence_penalties": torch.rand(BATCH, generator=generator),
        "repetition_penalties": torch.rand(BATCH, generator=generator) + 0.5,
    }


def cases() -> dict[str, dict[str, Any]]:
    k = torch.tensor([1, 5, 40, 300, 300, 7, 2, 20], dtype=torch.int32)
    p = torch.tensor([0.1, 0.9, 1.0, 0.5, 0.95, 1.0, 0.7, 0.99])
    mixed = torch.tensor([0.0, 0.8, 0.0, 1.2, 0.5, 0.0, 1.0, 2.0])
    return {
        "greedy": {"all_greedy": True, "all_random": False, "temperature": None},
        "greedy with penalties": {
            "all_greedy": True,
            "all_random": False,
            "temperature": None,
            **penalties(),
        },
        "random": {},
        "top-k": {"top_k": k},
        "top-p": {"top_p": p},
        "top-k and top-p": {"top_k": k, "top_p": p},
        "all seeded": {"top_k": k, "top_p": p, "generators": (0, 1, 2, 3, 4, 5, 6, 7)},
        "some seeded": {"top_p": p, "generators": (1, 4, 6)},
        "mixed temperatures": {"temperature": mixed, "all_random": False, "top_k": k, "generators": (3,)},
        "everything": {"temperature": mixed, "all_random": False, "top_k": k, "top_p": p, **penalties()},
        "allowed tokens": {
            "allowed_token_ids_mask": torch.arange(VOCABULARY).repeat(BATCH, 1) > 4,
            "top_p": p,
        },
        "bad words": {"bad_words_token_ids": {0: [[3], [3, 4]]}, "top_k": k},
    }


def run(sampler: Sampler, changes: dict[str, Any], steps: int = 3) -> list[Any]:
    """Runs several steps, so that the state of the generators is compared too."""
    changes = copy.deepcopy(changes)
    if "generators" in changes:
        changes["generators"] = seeded(*changes["generators"])
    described = metadata(**changes)
    torch.manual_seed(7)
    outputs = []
    for step in range(steps):
        output = sampler(logits(step), described)
        outputs.append(output.sampled_token_ids.tolist())
        if output.logprobs_tensors is not None:
            tensors = (output.logprobs_tensors.logprob_token_ids, output.logprobs_tensors.logprobs)
            outputs.append([tensor.tolist() for tensor in tensors])
    return [*outputs, torch.rand(1).item()]


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize("fp64", [False, True])
def test_tokens_are_upstreams(case: str, fp64: bool) -> None:
    changes = cases()[case]
    assert run(BackplaneSampler(use_fp64_gumbel=fp64), changes) == run(upstream(fp64=fp64), changes)


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("case", ["greedy with penalties", "everything"])
def test_log_probabilities_are_upstreams(mode: str, case: str) -> None:
    changes = cases()[case] | {"max_num_logprobs": 4}
    assert run(BackplaneSampler(mode), changes) == run(upstream(mode), changes)


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    sampler = BackplaneSampler()

    def tokens(*rows: int) -> list[int]:
        described = metadata(generators=seeded(*rows))
        return [int(sampler(logits(step), described).sampled_token_ids[3, 0]) for step in range(5)]

    assert tokens(3) == tokens(0, 1, 2, 3, 4, 5, 6, 7)


def update(*min_ps: float) -> BatchUpdate:
    added = [(row, SamplingParams(min_p=value), [], []) for row, value in enumerate(min_ps)]
    return BatchUpdate(batch_size=len(min_ps), removed=[], added=added, moved=[])


def test_min_p_is_upstreams(config: VllmConfig) -> None:
    results = []
    for kind in (BackplaneMinPLogitsProcessor, MinPLogitsProcessor):
        processor = kind(config, CPU, False)
        untouched = logits()
        assert torch.equal(processor.apply(untouched), logits())
        processor.update_state(update(0.0, 0.1, 0.5, 1.0, 0.0, 0.02, 0.3, 0.9))
        results.append(processor.apply(logits()))
    assert torch.equal(*results)
    masked = (results[0] == -float("inf")).sum(dim=1)
    assert masked[0] == 0
    assert masked[3] == VOCABULARY - 1


def runner(config: VllmConfig, sampler: Any = None) -> Any:
    """Returns the real parts of a model runner that `replace_sampler` replaces."""
    sampler = sampler or Sampler("processed_logprobs", True)
    return SimpleNamespace(
        sampler=sampler,
        rejection_sampler=RejectionSampler(sampler),
        vllm_config=config,
        device=CPU,
        input_batch=SimpleNamespace(logitsprocs=build_logitsprocs(config, CPU, False, False)),
    )


def test_replacing(config: VllmConfig) -> None:
    target = runner(config)
    others = [p for p in target.input_batch.logitsprocs.all if not isinstance(p, MinPLogitsProcessor)]
    replace_sampler(target)
    assert type(target.sampler) is BackplaneSampler
    assert target.rejection_sampler.sampler is target.sampler
    assert target.sampler.logprobs_mode == "processed_logprobs"
    assert target.sampler.topk_topp_sampler.logprobs_mode == "processed_logprobs"
    assert target.sampler.topk_topp_sampler.use_fp64_gumbel
    after = list(target.input_batch.logitsprocs.all)
    assert [type(p) for p in after if isinstance(p, MinPLogitsProcessor)] == [BackplaneMinPLogitsProcessor]
    assert [p for p in after if not isinstance(p, MinPLogitsProcessor)] == others


def test_replacing_twice_changes_nothing(config: VllmConfig) -> None:
    target = runner(config)
    replace_sampler(target)
    sampler, processors = target.sampler, list(target.input_batch.logitsprocs.all)
    replace_sampler(target)
    assert target.sampler is sampler
    assert list(target.input_batch.logitsprocs.all) == processors


def test_a_foreign_sampler_is_refused(config: VllmConfig) -> None:
    class Foreign(Sampler):
        pass

    with pytest.raises(BindingError, match="Foreign"):
        replace_sampler(runner(config, Foreign()))


def test_a_min_p_in_use_is_refused(config: VllmConfig) -> None:
    target = runner(config)
    for processor in target.input_batch.logitsprocs.argmax_invariant:
        processor.update_state(update(0.5))
    with pytest.raises(BindingError, match="before the first request"):
        replace_sampler(target)
