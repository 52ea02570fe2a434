"""Speculation gives the tokens of plain decoding, or tokens of the same distribution, and drafts what it should.

With tiny models of random weights; draft_heads.py says which drafts their heads should make. The documentation's
example is served with the default model.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import draft_heads
import pytest
import reference
import torch
from engine import Result, batch, greedy, job, run_engines
from server import Server
from transformers import AutoTokenizer
from worker_questions import ASKING

from tests.statistics_of_draws import UNLIKELY, p_value

pytestmark = [pytest.mark.server, pytest.mark.models]

PAGE = Path(__file__).resolve().parents[2] / "docs/speculative-decoding.md"
TOKENS, LONGER = 40, 4
REPEATS = [5, 6, 7] * 8
PROMPTS = [[7, 30, 21, 9, 44], list(range(3, 43)), [40, 41], REPEATS, list(range(47, 7, -3))]
INTERPRETED = {"NUMBA_DISABLE_JIT": "1"}
"""Compiling the lookup of n-grams takes seconds, which one engine shall spend."""
DEVICES: dict[str, dict[str, str | None]] = {
    "cpu": {"BACKPLANE_DEVICE": "cpu", **ASKING},
    "sim": {
        "BACKPLANE_DEVICE": "sim",
        "BACKPLANE_SIM_FALLBACK": "forbid",
        "BACKPLANE_SIM_MEMORY": "2GiB",
        **ASKING,
        **INTERPRETED,
    },
}
METHODS = {"ngram": "ngram", "suffix": "suffix", "draft": "draft model", "eagle3": "EAGLE-3", "mtp": "MTP"}
"""And what docs/features.toml calls them."""
WHERE_INSTALLED = pytest.mark.skipif(
    find_spec("arctic_inference") is None,
    reason="the package arctic-inference is not installed; docs/speculative-decoding.md says how",
)
DRAFTS = 3
DRAWS, KEPT, WARMTH = 1200, 3, 1.3
DRAWN = {"temperature": WARMTH, "top_k": KEPT, "max_tokens": 3, "ignore_eos": True, "detokenize": False}
DRAWN_FROM = {"ngram": "certain drafts", "eagle3": "drawn drafts"}
COUNTED = "vllm:spec_decode_num_"
TEXTS = ["A line that is written once more: the ferry leaves at nine.\n" * 4, "Water boils at 100 degrees because"]


@dataclass(frozen=True)
class Models:
    llama: Any
    eagle3: draft_heads.Eagle3Head
    mimo: Any
    mtp: draft_heads.MtpHead
    folder: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    return Models(*draft_heads.save_llama_with_eagle3(folder), *draft_heads.save_mimo(folder / "mimo"), folder)


def speculating(folder: Path) -> dict[str, dict[str, Any]]:
    """Configurations of speculation by method; those that are installed."""
    configured: dict[str, dict[str, Any]] = {
        "ngram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "suffix": {"method": "suffix"},
        "draft": {"method": "draft_model", "model": str(folder / "target")},
        "eagle3": {"method": "eagle3", "model": str(folder / "head"), "draft_sample_method": "probabilistic"},
        "mtp": {"method": "mtp"},
    }
    if find_spec("arctic_inference") is None:
        del configured["suffix"]
    return {method: {"num_speculative_tokens": DRAFTS, **given} for method, given in configured.items()}


def engines(folder: Path, device: str) -> dict[str, dict[str, Any]]:
    def one(model: Path, *steps: dict[str, Any], **more: Any) -> dict[str, Any]:
        return job(
            model, steps=steps, skip_tokenizer_init=True, disable_log_stats=False, max_num_seqs=32, seed=1, **more
        )

    targets = {"mtp": folder / "mimo"}
    asked = {"batch": batch(PROMPTS, greedy(TOKENS))}
    alone = {"batch": batch(PROMPTS[2:4], greedy(TOKENS), one_by_one=True)}
    drawn = {"batch": batch([REPEATS] * DRAWS, DRAWN)}
    count, replays, compiled = {"metrics": COUNTED}, {"ask": "replays"}, {"ask": "compiled_ngrams"}
    found = {
        method: one(
            targets.get(method, folder / "target"),
            *(compiled, asked, count, alone, replays),
            *((drawn, count) if method in DRAWN_FROM else ()),
            compiled,
            speculative_config=given,
        )
        for method, given in speculating(folder).items()
    }
    if device == "cpu":  # the others are held against its answers
        long = {"batch": batch(PROMPTS, greedy(TOKENS + LONGER))}
        found |= {"plain": one(folder / "target", long), "plain mtp": one(folder / "mimo", long)}
    return found


@dataclass(frozen=True)
class Runs:
    cpu: dict[str, Result]
    sim: dict[str, Result]

    def plain(self, method: str) -> list[list[int]]:
        """Longer answers than are asked of those who speculate."""
        return tokens(self.cpu["plain mtp" if method == "mtp" else "plain"]["steps"][0])

    def of(self, device: str, method: str) -> list[Any]:
        return list(getattr(self, device)[method]["steps"][1:-1])

    def compiled(self, device: str, method: str) -> tuple[Any, Any]:
        """At first and at last."""
        first, *_, last = getattr(self, device)[method]["steps"]
        return first, last


@pytest.fixture(scope="module")
def runs(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    done = {}
    for device, variables in DEVICES.items():
        jobs = engines(models.folder, device)
        results = run_engines(tmp_path_factory.mktemp(device), list(jobs.values()), variables, device=device)
        done[device] = dict(zip(jobs, results, strict=True))
    return Runs(**done)


def tokens(done: list[dict[str, Any]]) -> list[list[int]]:
    return [output["token_ids"] for output in done]


def counted(metrics: dict[str, Any], what: str) -> int:
    return int(metrics[COUNTED + what])


EVERY = pytest.mark.parametrize(
    ("method", "named"),
    [
        pytest.param(method, named, marks=[WHERE_INSTALLED] if method == "suffix" else [])
        for method, named in METHODS.items()
    ],
    ids=METHODS,
)
ON_EACH = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.feature("Speculative decoding: {named}", "{device}")
@EVERY
@ON_EACH
def test_tokens_equal_those_of_plain_decoding(runs: Runs, device: str, method: str, named: str) -> None:
    asked, metrics, alone, *_ = runs.of(device, method)
    plain = [answer[:TOKENS] for answer in runs.plain(method)]
    assert tokens(asked) == plain
    assert tokens(alone) == plain[2:4]
    assert 0 < counted(metrics, "accepted_tokens") <= counted(metrics, "draft_tokens")


def test_answers_depend_on_the_prompt(runs: Runs) -> None:
    """Or a request that was given another's tokens would not show."""
    for method in ("draft", "mtp"):
        answers = runs.plain(method)
        assert len({tuple(answer) for answer in answers}) == len(PROMPTS)


@ON_EACH
def test_a_draft_model_that_is_the_target_is_always_right(runs: Runs, device: str) -> None:
    metrics = runs.of(device, "draft")[1]
    assert counted(metrics, "accepted_tokens") == counted(metrics, "draft_tokens") > 0


@pytest.fixture(scope="module")
def right_drafts(runs: Runs, models: Models) -> dict[str, list[int]]:
    """How many of a step's drafts are right, for every step, by head."""
    heads = {"eagle3": (models.llama, models.eagle3), "mtp": (models.mimo, models.mtp)}
    return {
        method: [
            right
            for prompt, answer in zip(PROMPTS, runs.plain(method), strict=True)
            for right in draft_heads.expected(*modules, prompt, answer, asked=TOKENS, drafts=DRAFTS)
        ]
        for method, modules in heads.items()
    }


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
@ON_EACH
def test_heads_draft_what_they_should(runs: Runs, right_drafts: dict[str, list[int]], device: str, method: str) -> None:
    """Draft by draft, as computed by transformers' layers without a cache."""
    steps, metrics = right_drafts[method], runs.of(device, method)[1]
    by_place = [sum(accepted > place for accepted in steps) for place in range(DRAFTS)]
    assert metrics[f"{COUNTED}accepted_tokens_per_pos"] == by_place
    assert counted(metrics, "drafts") == len(steps)
    assert by_place[0] > by_place[1] > 0, "too few right drafts to say anything"


@pytest.mark.feature("Serving: graphs of decode steps", "{device}")
@EVERY
@ON_EACH
def test_steps_that_verify_were_replayed(runs: Runs, device: str, method: str, named: str) -> None:
    [found] = runs.of(device, method)[3]
    assert found["captured"] > 0
    assert found["given_up"] == 0
    # One sequence at a time; n-grams and suffixes do not always draft as many tokens as a graph takes.
    assert found["replays"] > (4 if method in ("ngram", "suffix") else TOKENS // 2)


def test_ngrams_are_compiled_before_the_first_request_and_once(runs: Runs) -> None:
    assert runs.compiled("cpu", "ngram") == ([1], [1])


@torch.inference_mode()
def shares(model: Any, prompt: list[int], warmth: float) -> dict[tuple[int, ...], float]:
    """The probability of every answer of three tokens, by transformers."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(DRAWN["max_tokens"]):
        logits = model(input_ids=torch.tensor([[*prompt, *answer] for answer in found])).logits[:, -1].double()
        best, ids = logits.topk(KEPT)
        odds = (best / warmth).softmax(-1).tolist()
        found = {
            (*answer, token): share * chance
            for (answer, share), row, chances in zip(found.items(), ids.tolist(), odds, strict=True)
            for token, chance in zip(row, chances, strict=True)
        }
    return found


@pytest.mark.feature("Speculative decoding: sampled output follows the same distribution", "{device}")
@pytest.mark.parametrize("method", DRAWN_FROM, ids=DRAWN_FROM.values())
@ON_EACH
def test_drawn_tokens_follow_the_distribution_of_the_model(
    runs: Runs, models: Models, device: str, method: str
) -> None:
    _, before, _, _, drawn, after = runs.of(device, method)
    drafted, accepted = (counted(after, what) - counted(before, what) for what in ("draft_tokens", "accepted_tokens"))
    assert 0.02 * drafted < accepted < 0.98 * drafted, "both must happen often"
    seen = Counter(tuple(answer) for answer in tokens(drawn))
    right, colder = (shares(models.llama, REPEATS, warmth) for warmth in (WARMTH, WARMTH / 3))
    assert set(seen) <= set(right)
    counts = [seen[answer] for answer in right]
    assert p_value(counts, list(right.values())) > UNLIKELY
    assert p_value(counts, [colder[answer] for answer in right]) < UNLIKELY, "too few draws to tell anything apart"


[_line] = re.findall(r"^vllm-backplane serve (.*--speculative-config .*)$", PAGE.read_text(), flags=re.MULTILINE)
EXAMPLE = shlex.split(_line)
LIMITS = ("--max-model-len", "512", "--max-num-seqs", "4")


def answer(server: Server, prompt: str | list[int]) -> list[int]:
    client = server.client()
    more = {"ignore_eos": True, "return_token_ids": True}
    name = client.models.list().data[0].id
    given = client.completions.create(model=name, prompt=prompt, max_tokens=TOKENS, temperature=0, extra_body=more)
    return list(given.choices[0].token_ids)


def told(server: Server) -> list[float]:
    """Drafts, and those that were right."""
    return [server.metric(f"{COUNTED}{what}_tokens_total") for what in ("draft", "accepted")]


def plain(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Transformers' answers."""
    found = [reference.continue_together(model, [prompt], TOKENS)[0] for prompt in prompts]
    assert min(one.smallest_margin for one in found) > 1e-3, "near a tie; change the prompts"
    return [one.token_ids for one in found]


@pytest.mark.feature("Speculative decoding: ngram", "cpu")
@pytest.mark.feature("Speculative decoding: over HTTP", "cpu")
def test_the_example_of_the_documentation(smollm2: Path, tmp_path: Path) -> None:
    """The default model, over HTTP: the tokens of plain decoding, and drafts that were right."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    expected = plain(reference.load(smollm2), [tokenizer.encode(text) for text in TEXTS])
    variables = {"BACKPLANE_DEVICE": "cpu", **INTERPRETED}
    with Server(tmp_path, *EXAMPLE, *LIMITS, variables=variables) as server:
        assert [answer(server, text) for text in TEXTS] == expected
        drafted, accepted = told(server)
    assert 0.5 * drafted < accepted, f"of {drafted} drafts {accepted} were accepted"


@pytest.mark.feature("Speculative decoding: {named}", "{device}")
@pytest.mark.feature("Speculative decoding: over HTTP", "{device}")
@pytest.mark.parametrize(
    ("device", "method", "named"), [("cpu", "draft", METHODS["draft"]), ("sim", "eagle3", METHODS["eagle3"])]
)
def test_another_method_with_a_tiny_model(models: Models, tmp_path: Path, device: str, method: str, named: str) -> None:
    """Over HTTP; prompts and answers are tokens, for which there are no words. The other methods differ from these
    behind the same option, and are run in one process above."""
    option = ("--speculative-config", json.dumps(speculating(models.folder)[method]))
    limits = (*LIMITS, "--max-num-batched-tokens", "64", "--dtype", "float32", "--skip-tokenizer-init")
    with Server(tmp_path, str(models.folder / "target"), *option, *limits, variables=DEVICES[device]) as server:
        assert f"Operators on device {device}:" in server.text()
        assert [answer(server, prompt) for prompt in PROMPTS] == plain(models.llama, PROMPTS)
        drafted, accepted = told(server)
    assert 0 < accepted <= drafted
