"""Tests the IO processor for long documents with tokenizers that vLLM's test servers do not have, and after errors."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import PoolingParams

from vllm_backplane.errors import BackplaneError
from vllm_backplane.io_processors.documents import DocumentProcessor

CONTEXT = 10


class Words:
    """Stands in for a tokenizer with one token for each word, and tokens before and after a text."""

    is_fast = True

    def __init__(self, before: tuple[int, ...] = (1,), after: tuple[int, ...] = (2,)) -> None:
        self.before, self.after = before, after

    def __call__(self, text: str, add_special_tokens: bool = True, **_options: Any) -> dict[str, Any]:
        words = list(re.finditer(r"\S+", text))
        ids = [10 + ord(word.group()[0]) for word in words]
        if add_special_tokens:
            ids = [*self.before, *ids, *self.after]
        return {"input_ids": ids, "offset_mapping": [word.span() for word in words]}


class OtherWordsWithSpecialTokens(Words):
    def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> dict[str, Any]:
        return super().__call__(text if add_special_tokens else f"{text}b {text}b", add_special_tokens, **options)


def processor(tokenizer: Any = None, task: str | None = None, lowers: bool = False) -> DocumentProcessor:
    model = SimpleNamespace(
        max_model_len=CONTEXT, pooler_config=SimpleNamespace(task=task), encoder_config={"do_lower_case": lowers}
    )
    renderer = SimpleNamespace(get_tokenizer=lambda: Words() if tokenizer is None else tokenizer)
    return DocumentProcessor(SimpleNamespace(model_config=model), renderer)


def outputs(prompts: list[dict[str, Any]], vectors: list[list[float]]) -> list[Any]:
    return [
        SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=SimpleNamespace(data=torch.tensor(vector)))
        for prompt, vector in zip(prompts, vectors, strict=True)
    ]


def ask(of: DocumentProcessor, request_id: str | None = None, **data: Any) -> list[dict[str, Any]]:
    return of.pre_process(of.parse_data(data), request_id)


@pytest.mark.parametrize("before", [(), (1,), (1, 3)])
@pytest.mark.parametrize("after", [(), (2,)])
def test_every_passage_has_the_special_tokens(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    text = " ".join("abcdefghijklmnopqrstuvwxyz")
    found = ask(processor(Words(before, after)), documents=[text], overlap_tokens=1)
    room = CONTEXT - len(before) - len(after)
    passages = []
    for prompt in found:
        ids = prompt["prompt_token_ids"]
        assert tuple(ids[: len(before)]) == before and tuple(ids[len(ids) - len(after) :]) == after
        passages.append([chr(token - 10) for token in ids[len(before) : len(ids) - len(after)]])
    assert all(len(passage) == room for passage in passages[:-1]) and 1 < len(passages[-1]) <= room
    assert all(first[-1] == second[0] for first, second in itertools.pairwise(passages))
    letters = passages[0] + [letter for passage in passages[1:] for letter in passage[1:]]
    assert " ".join(letters) == text


def test_vectors_are_weighted_by_tokens() -> None:
    ours = processor()
    found = ask(ours, documents=["a b c d e f g h i j", "z"], overlap_tokens=0, passage_embeddings=True)
    answer = ours.post_process(outputs(found, [[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]))
    long, short = answer["data"]
    expected = torch.nn.functional.normalize(torch.tensor([8.0, 2.0]), dim=0)
    assert torch.allclose(torch.tensor(long["embedding"]), expected)
    assert [passage["embedding"] for passage in long["passages"]] == [[1.0, 0.0], [0.0, 1.0]]
    assert [(passage["start"], passage["end"]) for passage in long["passages"]] == [(0, 15), (16, 19)]
    assert torch.allclose(torch.tensor(short["embedding"]), torch.tensor([0.6, 0.8]))
    assert answer["usage"] == {"prompt_tokens": 10 + 4 + 3}


def test_the_best_passage_counts() -> None:
    ours = processor()
    found = ask(ours, documents=["a", "b c d e f g h i j k", "l"], overlap_tokens=0, query="q", top_n=2)
    vectors = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [1.0, 0.0], [0.6, 0.8]]
    results = ours.post_process(outputs(found, vectors))["results"]
    assert [result["index"] for result in results] == [1, 0]
    assert results[0]["passage"] == {"start": 16, "end": 19, "tokens": 2}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: processor(task="classify"), "the pooler's task is 'classify' and not 'embed'"),
        (lambda: processor(SimpleNamespace(is_fast=False)), "does not report the place of each token"),
        (lambda: processor(lowers=True), "do_lower_case"),
        (lambda: processor(OtherWordsWithSpecialTokens()), "other tokens to the same text"),
    ],
)
def test_models_that_do_not_fit_are_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(BackplaneError, match=f"{text}.*remove --io-processor-plugin"):
        make()


@pytest.mark.parametrize("params", [PoolingParams(task="classify"), PoolingParams(use_activation=False)])
def test_parameters_of_other_vectors_are_refused(params: PoolingParams) -> None:
    with pytest.raises(ValueError, match="computes normalized embeddings; omit both"):
        processor().merge_pooling_params(params)


def test_dimensions_are_kept() -> None:
    assert processor().merge_pooling_params(PoolingParams(dimensions=8)).dimensions == 8


def test_changed_prompts_are_refused() -> None:
    ours = processor()
    found = ask(ours, documents=["a b"])
    with pytest.raises(ValueError, match="truncate_prompt_tokens or padding has changed a passage"):
        ours.post_process(outputs([{"prompt_token_ids": found[0]["prompt_token_ids"][:2]}], [[1.0]]))


def test_a_failed_request_leaves_nothing() -> None:
    ours = processor()

    async def failing() -> None:
        ask(ours, "one", documents=["a"])
        with pytest.raises(ValueError, match="a request with the id 'one' is running"):
            ask(ours, "one", documents=["b"])
        assert ours._plans.keys() == {"one"}
        raise OSError("the client is gone")

    async def run() -> None:
        task = asyncio.create_task(failing())
        with pytest.raises(OSError, match="the client is gone"):
            await task
        await asyncio.sleep(0)  # the end of a task is reported in the next iteration of the loop
        assert not ours._plans
        ask(ours, "one", documents=["a"])

    asyncio.run(run())


def test_calls_without_an_id_replace_what_is_left_over() -> None:
    """Tests `LLM.encode` in a task that lives on after an error, as in a notebook."""
    ours = processor()

    async def run() -> None:
        ask(ours, documents=["a"])
        found = ask(ours, documents=["a", "b"])
        assert len(ours.post_process(outputs(found, [[1.0], [1.0]]))["data"]) == 2

    asyncio.run(run())
    assert not ours._plans
