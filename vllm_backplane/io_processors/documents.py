"""Embeds documents that are longer than the model's context, and ranks them by their best passage.

The IO processor divides each document into passages of tokens, lets vLLM embed all passages of a request as one batch,
and combines the vectors. `docs/serve/long-documents.md` describes the request and the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from vllm import PoolingParams, PoolingRequestOutput
from vllm.plugins.io_processors.interface import IOProcessor

from vllm_backplane.errors import BackplaneError

NAME = "backplane_documents"
OVERLAP_DIVISOR = 8
"""A passage shares one token in eight with the passage before it, unless the request sets `overlap_tokens`."""
MAX_CHARACTERS = 1_000_000
"""Characters of a request. vLLM calls `pre_process` in its event loop, where other requests wait for the tokenizer."""
MAX_PASSAGES = 4096
"""Passages of a request. Each is a prompt of its own."""

_REMEDY = "remove --io-processor-plugin, or io_processor_plugin from the model's configuration"

Text = Annotated[str, StringConstraints(min_length=1)]


class Request(BaseModel):
    """Holds the field `data` of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    documents: Annotated[list[Text], Field(min_length=1, max_length=MAX_PASSAGES)]
    query: Text | None = None
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
        if (found := sum(map(len, self.documents)) + len(self.query or "")) > MAX_CHARACTERS:
            raise ValueError(f"the texts have {found:,} characters, and a request may have {MAX_CHARACTERS:,}")
        return self


@dataclass(frozen=True, slots=True)
class Passage:
    """Describes a part of a document: its place in the text, in characters, and the number of its tokens."""

    document: int
    start: int
    end: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Holds what the answer to a request needs. Passages are in the order of their prompts, after that of the query."""

    passages: tuple[Passage, ...]
    lengths: tuple[int, ...]
    """Tokens of each prompt."""
    ranks: bool
    top_n: int | None
    passage_embeddings: bool


class DocumentProcessor(IOProcessor[Request, dict[str, Any]]):
    """Divides documents into passages before the model, and combines the vectors of the passages after it."""

    def __init__(self, vllm_config: Any, renderer: Any) -> None:
        super().__init__(vllm_config, renderer)
        model = vllm_config.model_config
        self._tokenizer = renderer.get_tokenizer()
        _require_suitable(model, self._tokenizer)
        self._prefix_ids, self._suffix_ids = _special_tokens(self._tokenizer)
        self._max_passage_tokens = model.max_model_len - len(self._prefix_ids) - len(self._suffix_ids)
        self._plans: dict[str | None, Plan] = {}

    def parse_data(self, data: object) -> Request:
        try:
            return Request.model_validate(data)
        except ValidationError as fault:
            first = fault.errors()[0]
            place = ".".join(["data", *map(str, first["loc"])])
            raise ValueError(f"{place}: {first['msg'].removeprefix('Value error, ')}") from None

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        """Returns pooling parameters for normalized embeddings. Raises ValueError if the caller of `LLM.encode` asked
        for another task, or for no activation."""
        asked = params or PoolingParams()
        if asked.task not in (None, "plugin", "embed") or asked.use_activation is False:
            raise ValueError(
                f"task is {asked.task!r} and use_activation is {asked.use_activation!r}, and the IO processor '{NAME}' "
                "computes normalized embeddings; omit both"
            )
        return PoolingParams(task="embed", use_activation=True, dimensions=asked.dimensions)

    def pre_process(self, prompt: Request, request_id: str | None = None, **_options: Any) -> list[dict[str, Any]]:
        if request_id is not None and request_id in self._plans:  # clients choose ids
            raise ValueError(
                f"a request with the id {request_id!r} is running; send another X-Request-Id or request_id, or none"
            )
        size, overlap = self._size_and_overlap(prompt)
        prompts: list[dict[str, Any]] = []
        passages: list[Passage] = []
        if prompt.query is not None:
            ids, _offsets = self._tokens(prompt.query, "data.query")
            if len(ids) > self._max_passage_tokens:
                raise ValueError(
                    f"data.query has {len(ids)} tokens, and the model has room for {self._max_passage_tokens}"
                )
            prompts.append(self._prompt(ids))
        for number, text in enumerate(prompt.documents):
            ids, offsets = self._tokens(text, f"data.documents.{number}")
            starts = range(0, max(len(ids) - overlap, 1), size - overlap)
            if len(passages) + len(starts) > MAX_PASSAGES:
                raise ValueError(
                    f"the documents have more than {MAX_PASSAGES:,} passages of {size} tokens; send fewer documents "
                    "or a larger data.passage_tokens"
                )
            for first in starts:
                last = min(first + size, len(ids))
                prompts.append(self._prompt(ids[first:last]))
                passages.append(Passage(number, offsets[first][0], offsets[last - 1][1], last - first))
        lengths = tuple(len(one["prompt_token_ids"]) for one in prompts)
        ranks = prompt.query is not None
        self._keep(request_id, Plan(tuple(passages), lengths, ranks, prompt.top_n, prompt.passage_embeddings))
        return prompts

    def post_process(
        self, model_output: Sequence[PoolingRequestOutput], request_id: str | None = None, **_options: Any
    ) -> dict[str, Any]:
        plan = self._plans.pop(request_id)
        # vLLM applies these fields to prompts of tokens too, and no IO processor sees them before.
        if tuple(len(output.prompt_token_ids) for output in model_output) != plan.lengths:
            raise ValueError(
                "truncate_prompt_tokens or padding has changed a passage; omit both, or set data.passage_tokens"
            )
        vectors = torch.stack([output.outputs.data.float() for output in model_output])
        answer = _ranking(plan, vectors) if plan.ranks else _embeddings(plan, vectors)
        return answer | {"usage": {"prompt_tokens": sum(plan.lengths)}}

    def _size_and_overlap(self, request: Request) -> tuple[int, int]:
        """Returns the tokens of a passage, and how many of them it shares with the passage before it."""
        size = self._max_passage_tokens if request.passage_tokens is None else request.passage_tokens
        if size > self._max_passage_tokens:
            raise ValueError(f"data.passage_tokens is {size}, and the model has room for {self._max_passage_tokens}")
        overlap = size // OVERLAP_DIVISOR if request.overlap_tokens is None else request.overlap_tokens
        if overlap > size // 2:
            raise ValueError(f"data.overlap_tokens is {overlap}, and may be half of a passage of {size} tokens at most")
        return size, overlap

    def _tokens(self, text: str, name: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, truncation=False, verbose=False
        )
        if not encoded["input_ids"]:
            raise ValueError(f"{name} has no tokens")
        return encoded["input_ids"], encoded["offset_mapping"]

    def _prompt(self, ids: list[int]) -> dict[str, Any]:
        return {"prompt_token_ids": [*self._prefix_ids, *ids, *self._suffix_ids]}

    def _keep(self, request_id: str | None, plan: Plan) -> None:
        """Keeps a plan until `post_process` takes it, or until the task of its request ends because of an error.

        `LLM.encode` has no ids. Its calls come one after another, so the next one replaces a plan that is left over.
        """
        if request_id is not None and (task := asyncio.current_task()) is not None:

            def forget(_task: object) -> None:
                if self._plans.get(request_id) is plan:
                    del self._plans[request_id]

            task.add_done_callback(forget)
        self._plans[request_id] = plan


def _require_suitable(model: Any, tokenizer: Any) -> None:
    """Raises BackplaneError unless the model's tokenizer reports offsets and its pooler embeds."""
    task = getattr(model.pooler_config, "task", None)
    lowers = bool((getattr(model, "encoder_config", None) or {}).get("do_lower_case"))
    if task not in (None, "embed"):
        fault = f"the pooler's task is {task!r} and not 'embed'"
    elif not getattr(tokenizer, "is_fast", False):
        fault = f"its tokenizer, {type(tokenizer).__name__}, does not report the place of each token"
    elif lowers and _plain(tokenizer, "A") != _plain(tokenizer, "a"):
        fault = "vLLM lowercases texts before tokenization (do_lower_case), and passages are sent as token ids"
    else:
        return
    raise BackplaneError(f"the IO processor '{NAME}' does not fit this model: {fault}; {_REMEDY}")


def _plain(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns the tokens that the tokenizer puts before and after a text."""
    plain, whole = _plain(tokenizer, "a"), tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    raise BackplaneError(
        f"the IO processor '{NAME}' does not fit this model: with special tokens, its tokenizer gives other tokens to "
        f"the same text; {_REMEDY}"
    )


def _embeddings(plan: Plan, vectors: torch.Tensor) -> dict[str, Any]:
    """Returns one vector for each document: the mean of its passages, weighted by their tokens, of length 1."""
    items = []
    for number, rows in enumerate(_rows_by_document(plan)):
        weights = torch.tensor([float(plan.passages[row].tokens) for row in rows])
        mean = torch.nn.functional.normalize((weights[:, None] * vectors[rows]).sum(0), dim=0)
        passages: list[dict[str, Any]] = [_place(plan.passages[row]) for row in rows]
        if plan.passage_embeddings:
            for passage, row in zip(passages, rows, strict=True):
                passage["embedding"] = vectors[row].tolist()
        items.append({"index": number, "embedding": mean.tolist(), "passages": passages})
    return {"object": "list", "data": items}


def _ranking(plan: Plan, vectors: torch.Tensor) -> dict[str, Any]:
    """Returns the documents by the cosine similarity of the query and their best passage, best first."""
    query, passages = vectors[0], vectors[1:]
    similarity: list[float] = (passages @ query).tolist()
    best = [max(rows, key=lambda row: similarity[row]) for rows in _rows_by_document(plan)]
    ranked = sorted(enumerate(best), key=lambda found: -similarity[found[1]])[: plan.top_n]
    return {
        "results": [
            {"index": number, "relevance_score": similarity[row], "passage": _place(plan.passages[row])}
            for number, row in ranked
        ]
    }


def _rows_by_document(plan: Plan) -> Iterator[list[int]]:
    """Yields the numbers of the passages of each document. Passages of a document are neighbours."""
    rows: list[int] = []
    for row, passage in enumerate(plan.passages):
        if rows and passage.document != plan.passages[rows[0]].document:
            yield rows
            rows = []
        rows.append(row)
    yield rows


def _place(passage: Passage) -> dict[str, int]:
    return {"start": passage.start, "end": passage.end, "tokens": passage.tokens}
