"""Tests that replayed decode steps on the cpu device give the tokens of eager steps: padded, preempted, with prefixes.

The model is small and random, with the layers of the default model. test_parity.py compares the tokens of the default
model, replayed as well, with those of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf_models
import multimodal_models
import pytest
from architectures import ARCHITECTURES
from engine import Result, batch, greedy, job, require_backplane, try_engines
from server import LIMITS, Server

pytestmark = [pytest.mark.server, pytest.mark.models]

TOKENS = 16
LONG = 48
"""Number of output tokens where all six sequences must meet in a step: requests reach the engine one by one."""
PROMPTS = [[7, 300, 21, 9000, 44], list(range(1000, 1080)), [40000], list(range(31, 20031, 300)), [5, 6], [77, 78, 79]]
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 3, "max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
WORK = [
    *({"batch": batch(PROMPTS[:count], greedy(LONG if count == 6 else TOKENS))} for count in (1, 3, 6, 4)),
    {"batch": batch([[*PROMPTS[1], 9, more] for more in (1, 2)], greedy(TOKENS))},  # the prefix is in the cache by now
    {"batch": batch(PROMPTS[:2], SAMPLED)},
    {"rpc": "replays"},
]
OTHER_NUMBERS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
EXPERTS, FILE = "a mixture of experts", "a GGUF file"
OTHER_CACHES = ("MLA (DeepSeek)", "a hybrid of Mamba and attention")
"""Architectures with other KV caches: MLA's latent, and states beside keys, in layers of more than one kind."""
ENCODER_DECODER = "an encoder-decoder"
VENDOR, SPLIT = "a vendor's builder of metadata", "kernels with smaller blocks"
EXTENSIONS = {VENDOR: "vendor_builder.Extension", SPLIT: "small_kernel_blocks.Extension"}
"""Attention that workers load as an extension. It is not imported here: it would replace Backplane's own."""
PARTS = ("mode", "slots", "attention")
"""The parts of a step's metadata."""
BUFFERS = ("input_ids", "query_start_loc", "query_pos", "req_indices", "num_scheduled_tokens", "discard_request_mask",
           "num_accepted_tokens")  # fmt: skip
WRITTEN = {
    *(f"{name}.{side}" for name in BUFFERS for side in ("cpu", "gpu")),
    *("positions", "seq_lens", "optimistic_seq_lens_cpu", "num_computed_tokens", "prev_positions.cpu"),
}
"""Buffers that vLLM 0.32 writes for a decode step, beside block tables. The comparison finds them by itself; a
comparison without them would find no difference."""
TABLES = {"block_table.gpu", "slot_mapping.gpu"}
PADDED = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [2, 4, 8]}
BLOCK = 16 * (4 * 2 * 2 * 32 * 4)
"""Bytes of 16 tokens: layers, K and V, KV heads, head size, bytes of a float32."""
TIGHT = {"kv_cache_memory_bytes": 27 * BLOCK}  # six sequences do not fit until their end
CROWD = {"batch": batch([list(range(start, start + 60)) for start in range(100, 700, 100)], greedy(40))}
FIRST = {"batch": batch(PROMPTS[:1], greedy(8))}
COUNT = ({"rpc": "replays"}, {"rpc": "hooks"})
TRACED = [FIRST, *COUNT, {"trace": True}, FIRST, *COUNT, {"trace": False}, FIRST, *COUNT]
"""Steps before, during and after a trace is taken."""
METADATA = [
    *({"rpc": "make_another_kv_cache_config"}, {"rpc": "compare_decode_metadata"}),
    *(WORK[1], WORK[2], CROWD, WORK[1], {"rpc": "decode_metadata_compared"}),
]
"""Nothing is cached at the beginning. Steps of three sequences come before and after steps of six."""
METADATA_AGAIN = [
    *({"rpc": "make_another_input_batch"}, WORK[1], {"rpc": "decode_metadata_compared"}),
    *({"rpc": "make_another_kv_cache_config"}, WORK[1], {"rpc": "decode_metadata_compared"}),
]
INPUTS = [{"rpc": "compare_decode_inputs"}, CROWD, {"rpc": "decode_inputs_compared"}]
INPUTS_MISSED = [{"rpc": "plant_missed_writes"}, CROWD, {"rpc": "decode_inputs_compared"}]
MICRO_BATCHES = [{"rpc": ["would_have_fast_path", "parallel_config", "ubatch_size", size]} for size in (0, 2)]
SLOW_PREFILL = {"rpc": ["would_have_fast_path", "cache_config", "kv_sharing_fast_prefill", False]}
SMALL = [WORK[1], {"rpc": "replays"}]
METADATA_ONCE = [{"rpc": "compare_decode_metadata"}, WORK[1], {"rpc": "decode_metadata_compared"}]
WITHOUT: dict[str, dict[str, Any]] = {
    "numeric guard": {
        "additional_config": {"backplane": {"numeric_guard": "layers"}},
        "kv_sharing_fast_prefill": True,
        "steps": [*SMALL, {"rpc": "has_fast_path"}, SLOW_PREFILL],
    },
    "users who want none": {
        "compilation_config": {"cudagraph_mode": "NONE"},
        "cudagraph_metrics": True,
        "steps": [*SMALL, *METADATA_ONCE],
    },
    "tensor parallelism": {"tensor_parallel_size": 2, "steps": SMALL},
}
"""Engines without graphs, by the reason. Two of them also serve tests of the decode fast path."""


def twice(prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Returns steps that serve the prompts twice in one engine: replayed, then eager."""
    once = [
        *({"batch": batch(prompts[:count], greedy(LONG if count == 6 else TOKENS))} for count in (1, 3, 6, 4)),
        {"batch": batch(prompts[:2], SAMPLED)},
        {"rpc": "replays"},
    ]
    return [*once, {"rpc": "suspend_graphs"}, *once]


@dataclass(frozen=True)
class Run:
    result: Result
    log: str
    given: list[dict[str, Any]]

    @property
    def steps(self) -> list[Any]:
        assert "error" not in self.result, self.result["error"] + self.log[-4000:]
        require_backplane(self.result)
        return list(self.result["steps"])

    def results(self, step: dict[str, Any]) -> list[Any]:
        """Returns the result of each time that this step was executed."""
        return [result for result, given in zip(self.steps, self.given, strict=True) if given == step]

    def returned(self, function: str | list[Any]) -> list[Any]:
        """Returns the result of the first worker for each call of this function."""
        return [first for first, *_ in self.results({"rpc": function})]


@pytest.fixture(scope="module")
def runs(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("graphs")
    experts, blocks = folder / "experts", folder / "blocks.gguf"
    ARCHITECTURES["Mixtral: two experts of four"].save(experts)
    replace(gguf_models.MISTRAL, types=(gguf_models.Type.Q8_0, gguf_models.Type.Q4_0)).write(blocks)
    multimodal_models.whisper(folder / ENCODER_DECODER, seed=2)
    few = [[token % 500 + 5 for token in prompt] for prompt in PROMPTS]  # of a small vocabulary
    transcribed = {"batch": batch([multimodal_models.FIRST] * 3, greedy(TOKENS)) | {"sounds": [1, 2, 3]}}
    traces = {"profiler": "torch", "torch_profiler_dir": str(folder), "torch_profiler_with_stack": False}
    pictures = [{"rpc": "plant_picture_ranges"}, *METADATA_ONCE]
    engines = {
        "eager": job(
            tiny_llama, steps=[*WORK, *METADATA, *METADATA_AGAIN, *MICRO_BATCHES, *pictures], enforce_eager=True
        ),
        "replayed": job(tiny_llama, steps=WORK),
        "padded": job(tiny_llama, steps=[*WORK, *METADATA], compilation_config=PADDED),
        "tight": job(tiny_llama, steps=[CROWD, {"rpc": "replays"}, *TRACED], profiler_config=traces, **TIGHT),
        "tight and eager": job(tiny_llama, steps=[*INPUTS, *INPUTS_MISSED], enforce_eager=True, **TIGHT),
        "stale": job(tiny_llama, steps=[FIRST, {"rpc": "plant_stale_input"}, FIRST, {"rpc": "replays"}]),
        ENCODER_DECODER: job(
            folder / ENCODER_DECODER, steps=compared_in_both(transcribed), max_model_len=64, skip_tokenizer_init=False
        ),
        **{name: job(tiny_llama, **engine) for name, engine in WITHOUT.items()},
        **{
            name: job(tiny_llama, steps=METADATA_ONCE, enforce_eager=True, worker_extension_cls=extension)
            for name, extension in EXTENSIONS.items()
        },
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
        compared = compared_in_both(twice(few)[2])
        engines[name] = job(folder / name, steps=compared, enable_prefix_caching=False, skip_tokenizer_init=True)
    results, log = try_engines(folder, list(engines.values()))
    logs = re.split(r"^=== engine \d+: .*$", log.read_text(errors="replace"), flags=re.MULTILINE)[1:]
    return {
        name: Run(result, text, engine["steps"])
        for (name, engine), result, text in zip(engines.items(), results, logs, strict=True)
    }


def compared_in_both(work: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns steps that do the work twice: with the metadata of decode steps compared, and then with their inputs."""
    return [
        *({"rpc": "compare_decode_metadata"}, work, {"rpc": "decode_metadata_compared"}),
        *({"rpc": "compare_decode_inputs"}, work, {"rpc": "decode_inputs_compared"}),
    ]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Starts two replicas of a mixture of experts, which exchange in every step how many tokens each has."""
    folder = tmp_path_factory.mktemp("replicas")
    ARCHITECTURES["Mixtral: two experts of four"].save(folder / "experts")
    two = ("--data-parallel-size", "2", "--api-server-count", "1", "--skip-tokenizer-init")
    options = ("--served-model-name", "tiny", "--worker-extension-cls", "worker_rpc.OverHttp")
    variables = {
        "BACKPLANE_MEMORY_SHARE": "0.2",
    }
    with Server(folder, str(folder / "experts"), *LIMITS, *two, *options, variables=variables) as server:
        yield server


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
    assert len({tuple(output) for output in tokens(steps[2])}) == len(PROMPTS)
    assert replayed["replays"] >= 5 * (TOKENS - 1) - 20
    assert eager["replays"] == replayed["replays"]
    assert eager["given_up"] == 0


def test_answers_depend_on_the_prompt(runs: dict[str, Run]) -> None:
    """With constant outputs, a step replayed with the inputs of another step would not show."""
    outputs = tokens(runs["eager"].steps[2])
    assert len({tuple(output) for output in outputs}) == len(PROMPTS)
    assert all(len(set(output)) > 4 for output in outputs)


def test_tokens_are_the_same_when_sequences_are_preempted(runs: dict[str, Run]) -> None:
    assert tokens(runs["tight"].steps[0]) == tokens(runs["tight and eager"].steps[1])
    assert runs["tight"].steps[1][0]["replays"] > 40


@pytest.mark.parametrize("way", ["tight and eager", ENCODER_DECODER, *OTHER_CACHES])
def test_inputs_of_decode_steps_equal_those_of_vllm(runs: dict[str, Run], way: str) -> None:
    """All buffers of the runner are compared, and none may differ. Sequences have been preempted, and have come back in
    another order; some models have several block tables, or states without slots."""
    found = runs[way].returned("decode_inputs_compared")[0]
    assert set().union(*found["reported"]) == set()
    assert len(found["reported"]) == found["steps"] > (40 if way == "tight and eager" else 8)
    assert len(found["buffers"]) > 2 * len(found["written"])
    assert set(found["buffers"]) >= set(found["written"]) >= WRITTEN
    assert {name.rpartition("block_tables.")[2][2:] for name in set(found["written"]) - WRITTEN} == TABLES


def test_a_buffer_that_the_fast_path_does_not_write_is_named(runs: dict[str, Run]) -> None:
    """Each buffer that vLLM writes is left out once at least, and reported alone in that step."""
    before, planted = runs["tight and eager"].returned("decode_inputs_compared")
    assert set(planted["left_out"]) == set(before["written"]) >= WRITTEN
    assert planted["reported"] == [[name] for name in planted["left_out"]]


@pytest.mark.parametrize("way", ["padded", "eager", *OTHER_CACHES])
def test_metadata_of_decode_steps_equals_that_of_vllm(runs: dict[str, Run], way: str) -> None:
    """Metadata is made once for each number of sequences, and reused in later steps of as many sequences, also after
    steps of fewer and of more."""
    found = runs[way].returned("decode_metadata_compared")[0]
    for name in PARTS:
        counts = found[name]
        assert counts["differing"] == counts["mixed up"] == 0, name
        assert counts["requested"] > LONG - 10
        assert counts["repeated"] == counts["reused"] == counts["requested"] - counts["made"]
        assert 1 <= counts["made"] <= len(PROMPTS), "once for each number of sequences"


def test_padding_is_written_again_after_larger_steps(runs: dict[str, Run]) -> None:
    """The rows behind the last sequence are those of sequences of an earlier step. Without padding nothing is
    written."""
    [padded], [eager, *_] = (runs[way].returned("decode_metadata_compared") for way in ("padded", "eager"))
    assert padded["attention"]["rewritten"] > 0
    assert [eager[name]["rewritten"] for name in PARTS] == [0, 0, 0]


def test_with_other_buffers_all_metadata_is_made_again(runs: dict[str, Run]) -> None:
    """The runner gets another batch, whose buffers the metadata has to show, and then another configuration of the KV
    cache."""
    before, batched, configured, _ = runs["eager"].returned("decode_metadata_compared")
    for name in PARTS:
        for earlier, later in ((before, batched), (batched, configured)):
            more = {key: later[name][key] - earlier[name][key] for key in earlier[name]}
            assert 1 <= more["repeated"] - more["reused"] <= more["made"] <= 3, "of 1, 2 and 3 sequences"
            assert more["reused"] > 0
            assert more["differing"] == more["mixed up"] == 0
    done = [tokens(result) for result in runs["eager"].results(WORK[1])]
    assert done == [done[0]] * len(done)


@pytest.mark.parametrize("way", ["users who want none", ENCODER_DECODER, *EXTENSIONS])
def test_metadata_that_may_change_is_made_in_every_step(runs: dict[str, Run], way: str) -> None:
    """Nothing is reused with metrics that count every step, with attention to an encoder, with metadata of a vendor's
    own, and with block tables that are computed for kernels."""
    found = runs[way].returned("decode_metadata_compared")[0]
    assert_made_in_every_step(found)
    builders = {ENCODER_DECODER: ["BackplaneMetadataBuilder", "CrossAttentionBuilder"], VENDOR: ["VendorBuilder"]}
    assert found["builders"] == builders.get(way, ["BackplaneMetadataBuilder"])
    assert set(found["kernel_block_sizes"]) == {8 if way == SPLIT else None}
    if way in EXTENSIONS:
        assert tokens(runs[way].steps[1]) == tokens(runs["eager"].steps[1])


def test_metadata_with_ranges_of_pictures_is_made_in_every_step(runs: dict[str, Run]) -> None:
    """The runner of a text model is changed to have such ranges. Models with such ranges are refused at start:
    Backplane's attention does not support them."""
    assert_made_in_every_step(runs["eager"].returned("decode_metadata_compared")[-1])


def assert_made_in_every_step(found: dict[str, Any]) -> None:
    for name in PARTS:
        assert found[name]["requested"] == found[name]["made"] > 8
        assert found[name]["reused"] == 0 < found[name]["repeated"]


def test_fast_prefill_of_shared_kv_caches_is_left_to_vllm(runs: dict[str, Run]) -> None:
    """The tokens are in test_others_are_served_without_graphs. Without the option the same runner has the fast path."""
    assert runs["numeric guard"].returned("has_fast_path") == [False]
    assert runs["numeric guard"].results(SLOW_PREFILL) == [[True]]


def test_micro_batches_are_left_to_vllm(runs: dict[str, Run]) -> None:
    """The runner of an engine without micro-batches is queried: vLLM runs micro-batches on CUDA streams, which the cpu
    device does not have, and needs DeepEP's kernels."""
    without, two = MICRO_BATCHES
    assert runs["eager"].results(without) == [[True]]
    assert runs["eager"].results(two) == [[False]]


def test_replicas_decide_in_every_step_together_how_it_is_executed(replicas: Server) -> None:
    """The rest of the metadata is reused. If a replica did not take part, the other would hang."""

    def call(method: str) -> Any:
        response = replicas.http.post("/collective_rpc", json={"method": method})
        assert response.status_code == 200, response.text
        return response.json()["results"]

    call("rpc_compare_decode_metadata")
    replicas.complete([7, 300, 21], TOKENS, replica=0)
    [found] = call("rpc_decode_metadata")
    assert found["mode"]["requested"] == found["mode"]["made"] == TOKENS - 1
    for name in ("slots", "attention"):
        assert found[name]["made"] == 1
        assert found[name]["reused"] == TOKENS - 2
        assert found[name]["differing"] == 0


def test_a_trace_leaves_nothing_behind(runs: dict[str, Run]) -> None:
    """Steps are eager while a trace is taken, and replayed again after it, without a hook and at no cost."""
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
    done, workers = runs[name].steps[:2]
    assert tokens(done) == tokens(runs["replayed"].steps[1])
    assert all(worker["replays"] == 0 for worker in workers)


def test_a_stale_input_gives_no_wrong_tokens(runs: dict[str, Run]) -> None:
    first, _, second, counted = runs["stale"].steps
    assert tokens(second) == tokens(first)
    assert counted == [{"captured": 1, "replays": 6, "given_up": 1}]
    assert "run eagerly, which is slower: the input input_ids is another tensor" in runs["stale"].log
