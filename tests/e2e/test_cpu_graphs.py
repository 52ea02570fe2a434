"""Decode steps replayed on the cpu device give the tokens of eager ones: padded, preempted, from prefixes.

With a small random model, which has the layers of the default one; that one's own tokens, replayed as well, are
compared with transformers' in test_parity.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf_models
import pytest
from architectures import ARCHITECTURES
from engine import Result, batch, greedy, insist_on_backplane, job, try_engines
from worker_questions import ASKING

pytestmark = [pytest.mark.server, pytest.mark.models]

TOKENS = 16
LONG = 48
"""Where all six are to be in a step together: requests reach the engine one by one."""
PROMPTS = [[7, 300, 21, 9000, 44], list(range(1000, 1080)), [40000], list(range(31, 20031, 300)), [5, 6], [77, 78, 79]]
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 3, "max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
WORK = [
    *({"batch": batch(PROMPTS[:count], greedy(LONG if count == 6 else TOKENS))} for count in (1, 3, 6, 4)),
    {"batch": batch([[*PROMPTS[1], 9, more] for more in (1, 2)], greedy(TOKENS))},  # the prefix is in the cache by now
    {"batch": batch(PROMPTS[:2], SAMPLED)},
    {"ask": "replays"},
]
OTHER_NUMBERS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
EXPERTS, FILE = "a mixture of experts", "a GGUF file"
OTHER_CACHES = ("MLA (DeepSeek)", "a hybrid of Mamba and attention")
"""A latent, and states beside keys: layers of more than one kind, told in other ways."""
PADDED = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [2, 4, 8]}
BLOCK = 16 * (4 * 2 * 2 * 32 * 4)
"""Bytes of 16 tokens: layers, K and V, KV heads, head size, bytes of a float32."""
TIGHT = {"kv_cache_memory_bytes": 27 * BLOCK}  # six sequences do not fit until their end
CROWD = {"batch": batch([list(range(start, start + 60)) for start in range(100, 700, 100)], greedy(40))}
FIRST = {"batch": batch(PROMPTS[:1], greedy(8))}
COUNT = ({"ask": "replays"}, {"ask": "hooks"})
TRACED = [FIRST, *COUNT, {"trace": True}, FIRST, *COUNT, {"trace": False}, FIRST, *COUNT]
"""Steps before, during and after a trace is taken."""
TOLD = [{"ask": "compare_decode_metadata"}, WORK[2], CROWD, {"ask": "decode_metadata_compared"}]
COMPARED = [{"ask": "compare_decode_inputs"}, CROWD, {"ask": "decode_inputs_compared"}]
WITHOUT: dict[str, dict[str, Any]] = {
    "numeric guard": {"additional_config": {"backplane": {"numeric_guard": "layers"}}},
    "users who want none": {"compilation_config": {"cudagraph_mode": "NONE"}},
    "tensor parallelism": {"tensor_parallel_size": 2},
}
"""What is served without graphs, and why."""


def twice(prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """First replayed, then eager, by one engine."""
    once = [
        *({"batch": batch(prompts[:count], greedy(LONG if count == 6 else TOKENS))} for count in (1, 3, 6, 4)),
        {"batch": batch(prompts[:2], SAMPLED)},
        {"ask": "replays"},
    ]
    return [*once, {"ask": "suspend_graphs"}, *once]


@dataclass(frozen=True)
class Run:
    result: Result
    log: str

    @property
    def steps(self) -> list[Any]:
        assert "error" not in self.result, self.result["error"] + self.log[-4000:]
        insist_on_backplane(self.result)
        return list(self.result["steps"])


@pytest.fixture(scope="module")
def runs(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    small = [WORK[1], {"ask": "replays"}]
    folder = tmp_path_factory.mktemp("graphs")
    experts, blocks = folder / "experts", folder / "blocks.gguf"
    ARCHITECTURES["Mixtral: two experts of four"].save(experts)
    replace(gguf_models.MISTRAL, types=(gguf_models.Type.Q8_0, gguf_models.Type.Q4_0)).write(blocks)
    few = [[token % 500 + 5 for token in prompt] for prompt in PROMPTS]  # of a small vocabulary
    traces = {"profiler": "torch", "torch_profiler_dir": str(folder), "torch_profiler_with_stack": False}
    engines = {
        "eager": job(tiny_llama, steps=[*WORK, *TOLD], enforce_eager=True),
        "replayed": job(tiny_llama, steps=WORK),
        "padded": job(tiny_llama, steps=[*WORK, *TOLD], compilation_config=PADDED),
        "tight": job(tiny_llama, steps=[CROWD, {"ask": "replays"}, *TRACED], profiler_config=traces, **TIGHT),
        "tight and eager": job(tiny_llama, steps=COMPARED, enforce_eager=True, **TIGHT),
        "stale": job(tiny_llama, steps=[FIRST, {"ask": "plant_stale_input"}, FIRST, {"ask": "replays"}]),
        **{name: job(tiny_llama, steps=small, **engine) for name, engine in WITHOUT.items()},
        **{
            name: job(tiny_llama, steps=twice(PROMPTS), enable_prefix_caching=False, **engine)
            for name, engine in OTHER_NUMBERS.items()
        },
        **{
            name: job(model, steps=twice(few), enable_prefix_caching=False, skip_tokenizer_init=True)
            for name, model in ((EXPERTS, experts), (FILE, blocks))
        },
    }
    for name in OTHER_CACHES:
        ARCHITECTURES[name].save(folder / name)
        asked = [{"ask": "compare_decode_metadata"}, twice(few)[2], {"ask": "decode_metadata_compared"}]
        engines[name] = job(folder / name, steps=asked, enable_prefix_caching=False, skip_tokenizer_init=True)
    results, log = try_engines(folder, list(engines.values()), ASKING)
    logs = re.split(r"^=== engine \d+: .*$", log.read_text(errors="replace"), flags=re.MULTILINE)[1:]
    return {name: Run(result, text) for name, result, text in zip(engines, results, logs, strict=True)}


def tokens(done: list[dict[str, Any]]) -> list[list[int]]:
    return [output["token_ids"] for output in done]


@pytest.mark.feature("Serving: graphs of decode steps", "cpu")
@pytest.mark.parametrize("way", ["replayed", "padded"])
def test_tokens_equal_those_of_eager_steps(runs: dict[str, Run], way: str) -> None:
    for place in range(len(WORK) - 1):
        assert tokens(runs[way].steps[place]) == tokens(runs["eager"].steps[place]), WORK[place]
    assert runs[way].steps[4][1]["num_cached_tokens"] > 0


@pytest.mark.parametrize("name", [*OTHER_NUMBERS, EXPERTS, FILE])
def test_tokens_equal_those_of_eager_steps_in_other_numbers_and_models(runs: dict[str, Run], name: str) -> None:
    steps = runs[name].steps
    half = len(steps) // 2
    [replayed], [eager] = steps[half - 1], steps[-1]
    for place in range(half - 1):
        assert tokens(steps[place]) == tokens(steps[half + 1 + place]), place
    assert len({tuple(answer) for answer in tokens(steps[2])}) == len(PROMPTS)
    assert replayed["replays"] >= 5 * (TOKENS - 1) - 20
    assert eager["replays"] == replayed["replays"]
    assert eager["given_up"] == 0


def test_answers_depend_on_the_prompt(runs: dict[str, Run]) -> None:
    """A step replayed with another's inputs would not show in a constant answer."""
    answers = tokens(runs["eager"].steps[2])
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS)
    assert all(len(set(answer)) > 4 for answer in answers)


def test_tokens_are_the_same_when_sequences_are_preempted(runs: dict[str, Run]) -> None:
    assert tokens(runs["tight"].steps[0]) == tokens(runs["tight and eager"].steps[1])
    assert runs["tight"].steps[1][0]["replays"] > 40


def test_inputs_of_decode_steps_are_what_vllm_makes_of_them(runs: dict[str, Run]) -> None:
    """Also after sequences have been preempted, and have come back in another order."""
    _, _, [found] = runs["tight and eager"].steps
    assert found["differing"] == []
    assert found["steps"] > 40


@pytest.mark.parametrize("way", ["padded", "eager", *OTHER_CACHES])
def test_what_decode_steps_are_told_is_what_vllm_makes_of_them(runs: dict[str, Run], way: str) -> None:
    """Of fewer sequences than before and more; with padding where sequences were."""
    [found] = runs[way].steps[-1]
    assert found["differing"] == []
    assert found["told"] > 3 * (LONG - 10)
    assert found["kept"] > found["told"] - 3 * 9  # once for each number of sequences


def test_a_trace_leaves_nothing_behind(runs: dict[str, Run]) -> None:
    """Steps are eager while it is taken, and replayed again after it, without a hook: it costs them nothing."""
    before, [replayed], [hooks], _, during, [eager], [traced], _, after, [again], [left] = runs["tight"].steps[2:]
    assert tokens(before) == tokens(during) == tokens(after)
    assert eager["replays"] == replayed["replays"]
    assert again["replays"] > eager["replays"]
    assert traced > hooks == left


def test_steps_were_replayed(runs: dict[str, Run]) -> None:
    [eager], [exact], [padded] = (runs[way].steps[len(WORK) - 1] for way in ("eager", "replayed", "padded"))
    assert eager == {"captured": 0, "replays": 0, "given_up": 0}
    # Of each batch: all tokens but the first. The first step of a size is captured; some share one with a prompt:
    # requests reach the engine one by one.
    decoded = 5 * (TOKENS - 1) + LONG - 1
    for found in (exact, padded):
        assert found["replays"] >= decoded - 24
        assert found["given_up"] == 0
    assert exact["captured"] >= 5, "1, 2, 3, 4 and 6 sequences"
    assert padded["captured"] == 3


@pytest.mark.parametrize("name", WITHOUT)
def test_others_are_served_without_graphs(runs: dict[str, Run], name: str) -> None:
    done, workers = runs[name].steps
    assert tokens(done) == tokens(runs["replayed"].steps[1])
    assert all(worker["replays"] == 0 for worker in workers)


def test_a_stale_input_gives_no_wrong_tokens(runs: dict[str, Run]) -> None:
    first, _, second, counted = runs["stale"].steps
    assert tokens(second) == tokens(first)
    assert counted == [{"captured": 1, "replays": 6, "given_up": 1}]
    assert "run eagerly, which is slower: the input input_ids is another tensor" in runs["stale"].log
