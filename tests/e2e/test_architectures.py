"""Tests many model architectures with tiny random weights on each device: the tokens equal those of transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import reference
from architectures import ARCHITECTURES
from engine import Result, batch, greedy, job, require_backplane, run_engines, try_engines
from processes import SIM

pytestmark = pytest.mark.server

TOKENS = 16
PROMPTS = [
    [3, 77, 401, 12],
    [(17 * place + place * place) % 500 + 5 for place in range(40)],
    [(31 * place) % 490 + 7 for place in range(100)],
]
LOGPROB_TOLERANCE = 1e-4
MARGIN = 1e-2
"""Smallest allowed difference between the two most likely tokens, far above any rounding error."""

DEVICES: dict[str, dict[str, str]] = {
    "cpu": {},
    "sim": SIM,
}
GRAPHS: dict[str, dict[str, Any]] = {"cpu": {}, "sim": {"compilation_config": {"cudagraph_capture_sizes": [1, 4]}}}
"""Engine arguments by device. The simulated card captures graphs of these sizes; two and three sequences are padded to
four."""


ELSEWHERE_ON_SIM = {
    "Gemma2: every second layer sees a window": "the operators of Gemma2 with soft caps",
    "OPT: ReLU, positions with an offset": "the operators of GPT-2, and ReLU in test_every_operator.py",
    "Qwen-MoE": "test_served_families.py",
    "MLA (DeepSeek)": "test_served_families.py",
    "gated delta net (Qwen-Next)": "test_served_families.py",
}
"""Models that run on sim in `make test-all` only, and what tests their operators there in `make test`."""
ON_EACH = [
    pytest.param(
        *(device, name),
        marks=[pytest.mark.exhaustive] if device == "sim" and name in ELSEWHERE_ON_SIM else [],
        id=f"{device}-{name}",
    )
    for device in DEVICES
    for name in ARCHITECTURES
]


@cache
def answers(name: str) -> list[reference.Continuation]:
    """Returns the outputs of transformers for all prompts."""
    model = ARCHITECTURES[name].build()
    return [reference.continue_without_cache(model, ids, TOKENS) for ids in PROMPTS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saves all models, and returns their folders by name."""
    found = {name: tmp_path_factory.mktemp("model") for name in ARCHITECTURES}
    for name, folder in found.items():
        ARCHITECTURES[name].save(folder)
    return found


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a function of the device that returns the engines' results by architecture.

    One process runs all engines of the tests that were selected, one after another.
    """
    selected = {item.name for item in request.session.items if item.path == request.path}
    # With 64 tokens per step, long prompts are split into chunks, and short ones decode in the same steps.
    work = batch(PROMPTS, greedy(TOKENS, logprobs=0))
    limits = {"skip_tokenizer_init": True, "max_num_seqs": 4, "max_num_batched_tokens": 64}

    @cache
    def run(device: str) -> dict[str, Result]:
        names = [name for name in folders if f"{test_tokens_equal_transformers.__name__}[{device}-{name}]" in selected]
        jobs = [job(folders[name], work, **limits, **GRAPHS[device]) for name in names]
        results, log = try_engines(tmp_path_factory.mktemp(device), jobs, DEVICES[device])
        assert log.read_text(errors="replace").count(f"Operators on device {device}:") == len(jobs)
        return dict(zip(names, results, strict=True))

    return run


@pytest.mark.feature("Model family: {name}", "{device}")
@pytest.mark.parametrize(("device", "name"), ON_EACH)
def test_tokens_equal_transformers(outcomes: Any, name: str, device: str) -> None:
    result = outcomes(device)[name]
    assert "error" not in result, result["error"]
    require_backplane(result)
    for expected, output in zip(answers(name), result["batches"][0], strict=True):
        assert output["token_ids"] == expected.token_ids
        assert output["logprobs"] == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)


DIVIDED = {"Mamba": 3, "Mamba2": 3, "a hybrid of Mamba and attention": 15, "gated delta net (Qwen-Next)": 15}
"""Number of KV blocks by model, one of which vLLM reserves. A sequence needs one block for each recurrent state, and
with attention further blocks as it grows. The blocks are too few for three complete sequences."""
WITHOUT_ATTENTION = ("Mamba", "Mamba2")
PREEMPTED = "vllm:num_preemptions"


@pytest.fixture(scope="module")
def divided(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the steps of engines with two workers and too small a KV cache, by model.

    The first batch runs undisturbed. In the second one all requests are preempted once.
    """
    work = batch(PROMPTS, greedy(TOKENS, logprobs=0))
    preemptions = {"metrics": PREEMPTED}
    limits = {
        "skip_tokenizer_init": True,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "tensor_parallel_size": 2,
        "disable_log_stats": False,
    }
    jobs = [
        job(
            folders[name],
            steps=[{"batch": work}, preemptions, {"interrupted": {**work, "after": 6}}, preemptions],
            num_gpu_blocks_override=blocks,
            **limits,
        )
        for name, blocks in DIVIDED.items()
    ]
    results = run_engines(tmp_path_factory.mktemp("divided"), jobs)
    return {name: result["steps"] for name, result in zip(DIVIDED, results, strict=True)}


@pytest.mark.parametrize("name", DIVIDED)
def test_states_that_are_divided_and_computed_again(divided: dict[str, Any], name: str) -> None:
    """Tests preemption: a preempted sequence loses its recurrent state, and another sequence gets its blocks."""
    crowded, first, again, second = divided[name]
    for done in (crowded, again):
        for expected, output in zip(answers(name), done, strict=True):
            assert output["token_ids"] == expected.token_ids
            assert output["logprobs"] == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE)
    # Only attention needs more blocks as a sequence grows. Models without attention are not preempted; requests wait.
    assert (first[PREEMPTED] > 0) == (name not in WITHOUT_ATTENTION)
    assert second[PREEMPTED] > first[PREEMPTED] + 1


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_comparison_would_notice(name: str) -> None:
    """Tests that the feature of each model changes its outputs, and that no output is constant or near a tie."""
    without = ARCHITECTURES[name].build_without()
    others = (reference.continue_without_cache(without, ids, TOKENS) for ids in PROMPTS)
    assert any(answer.token_ids != other.token_ids for answer, other in zip(answers(name), others, strict=False))
    assert all(len(set(answer.token_ids)) > 3 for answer in answers(name))
    assert min(answer.smallest_margin for answer in answers(name)) > MARGIN, "near a tie; change the seed"
