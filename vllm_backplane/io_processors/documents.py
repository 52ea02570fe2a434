"""Embeds documents that are longer than the model's context, and ranks them by their best passage.

The IO processor divides each document into passages of tokens, lets vLLM embed all passages of a request as one batch,
and combines the vectors. `docs/serve/long-documents.md` describes the request and the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from vllm import PoolingParams, PoolingRequestOutput
from vllm.plugins.io_processors.interface import IOProcessor

from vllm_backplane.errors import BackplaneError

OVERLAP_SHARE = 8
"""A passage shares one token in eight with the passage before it, unless the request has a number."""


class Request(BaseModel):
    """The field `data` of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    documents: list[str] = Field(min_length=1)
    query: str | None = Field(default=None, min_length=1)
    top_n: int | None = Field(default=None, ge=1)
    passage_tokens: int | None = Field(default=None, ge=1)
    overlap_tokens: int | None = Field(default=None, ge=0)
    passage_embeddings: bool = False

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Request:
        if self.top_n is not None and self.query is None:
            raise ValueError("top_n needs a query, by which the documents are ranked")
        if self.passage_embeddings and self.query is not None:
            raise ValueError("passage_embeddings is for requests without a query, which are answered with embeddings")
        return self


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a document: its place in the text, in characters, and the number of its tokens."""

    document: int
    start: int
    end: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The passages of a request in the order of their prompts. The prompt of a query precedes them."""

    request: Request
    passages: tuple[Passage, ...]


class DocumentProcessor(IOProcessor[Request, dict[str, Any]]):
    """Divides documents into passages before the model, and combines the vectors of the passages after it."""

    def __init__(self, vllm_config: Any, renderer: Any) -> None:
        super().__init__(vllm_config, renderer)
        self._tokenizer = renderer.get_tokenizer()
        if not getattr(self._tokenizer, "is_fast", False):
            raise BackplaneError(
                f"the IO processor 'backplane_documents' needs a tokenizer that reports the place of each token, and "
                f"{type(self._tokenizer).__name__} does not; serve the model without --io-processor-plugin"
            )
        self._before, self._after = _special_tokens(self._tokenizer)
        self._most = vllm_config.model_config.max_model_len - len(self._before) - len(self._after)
        self._plans: dict[str | None, Plan] = {}

    def parse_data(self, data: object) -> Request:
        try:
            return Request.model_validate(data)
        except ValidationError as fault:
            first = fault.errors()[0]
            place = ".".join(["data", *map(str, first["loc"])])
            raise ValueError(f"{place}: {first['msg'].removeprefix('Value error, ')}") from None

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        """Returns parameters for vectors of length 1, which every step below assumes."""
        return PoolingParams(task="embed", use_activation=True)

    def pre_process(self, prompt: Request, request_id: str | None = None, **_options: Any) -> list[dict[str, Any]]:
        size = self._most if prompt.passage_tokens is None else prompt.passage_tokens
        if size > self._most:
            raise ValueError(f"data.passage_tokens is {size}, and the model has room for {self._most}")
        overlap = size // OVERLAP_SHARE if prompt.overlap_tokens is None else prompt.overlap_tokens
        if overlap >= size:
            raise ValueError(f"data.overlap_tokens is {overlap}, and must be less than the {size} tokens of a passage")
        prompts, passages = [], []
        if prompt.query is not None:
            ids, _places = self._tokens(prompt.query, "data.query")
            if len(ids) > self._most:
                raise ValueError(f"data.query has {len(ids)} tokens, and the model has room for {self._most}")
            prompts.append(self._prompt(ids))
        for number, text in enumerate(prompt.documents):
            ids, places = self._tokens(text, f"data.documents.{number}")
            for first in range(0, max(len(ids) - overlap, 1), size - overlap):
                last = min(first + size, len(ids))
                prompts.append(self._prompt(ids[first:last]))
                passages.append(Passage(number, places[first][0], places[last - 1][1], last - first))
        self._keep(request_id, Plan(prompt, tuple(passages)))
        return prompts

    def post_process(
        self, model_output: Sequence[PoolingRequestOutput], request_id: str | None = None, **_options: Any
    ) -> dict[str, Any]:
        plan = self._plans.pop(request_id)
        vectors = torch.stack([output.outputs.data.float() for output in model_output])
        answer = _ranking(plan, vectors) if plan.request.query is not None else _embeddings(plan, vectors)
        return answer | {"usage": {"prompt_tokens": sum(len(output.prompt_token_ids) for output in model_output)}}

    def _tokens(self, text: str, name: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
        )
        if not encoded["input_ids"]:
            raise ValueError(f"{name} has no tokens")
        return encoded["input_ids"], encoded["offset_mapping"]

    def _prompt(self, ids: list[int]) -> dict[str, Any]:
        return {"prompt_token_ids": [*self._before, *ids, *self._after]}

    def _keep(self, request_id: str | None, plan: Plan) -> None:
        """Keeps a plan until `post_process` takes it, or until the task of its request ends because of an error."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # LLM.encode, without an event loop; its requests come one after another, without an id
            task = None
        if task is not None:
            # Clients choose ids, and would get each other's answers.
            if request_id in self._plans:
                raise ValueError(f"another request with the id {request_id} is running; send an id of its own, or none")

            def forget(_task: object) -> None:
                if self._plans.get(request_id) is plan:
                    del self._plans[request_id]

            task.add_done_callback(forget)
        self._plans[request_id] = plan


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns the tokens that the tokenizer puts before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    raise BackplaneError(
        "the IO processor 'backplane_documents' cannot divide documents for this model: with special tokens, its "
        "tokenizer gives other tokens to the same text; serve the model without --io-processor-plugin"
    )


def _embeddings(plan: Plan, vectors: torch.Tensor) -> dict[str, Any]:
    """Returns one vector for each document: the mean of its passages, weighted by their tokens, of length 1."""
    items = []
    for number in range(len(plan.request.documents)):
        rows = [row for row, passage in enumerate(plan.passages) if passage.document == number]
        weights = torch.tensor([float(plan.passages[row].tokens) for row in rows])
        mean = torch.nn.functional.normalize((weights[:, None] * vectors[rows]).sum(0), dim=0)
        passages: list[dict[str, Any]] = [_place(plan.passages[row]) for row in rows]
        if plan.request.passage_embeddings:
            for passage, row in zip(passages, rows, strict=True):
                passage["embedding"] = vectors[row].tolist()
        items.append({"index": number, "embedding": mean.tolist(), "passages": passages})
    return {"object": "list", "data": items}


def _ranking(plan: Plan, vectors: torch.Tensor) -> dict[str, Any]:
    """Returns the documents by the cosine similarity of the query and their best passage, best first."""
    scores = (vectors[1:] @ vectors[0]).tolist()
    best: dict[int, int] = {}
    for row, passage in enumerate(plan.passages):
        if passage.document not in best or scores[row] > scores[best[passage.document]]:
            best[passage.document] = row
    ranked = sorted(best.items(), key=lambda item: -scores[item[1]])[: plan.request.top_n]
    return {
        "results": [
            {"index": number, "relevance_score": scores[row], "passage": _place(plan.passages[row])}
            for number, row in ranked
        ]
    }


def _place(passage: Passage) -> dict[str, int]:
    return {"start": passage.start, "end": passage.end, "tokens": passage.tokens}
