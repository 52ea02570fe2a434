"""Tests which tokens the perplexity counts, and the standard error of its change, with known samples."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.perplexity import Part, change_of, message, parts_of, tokens_within, whole

SENTENCE = "Who keeps the lighthouse in winter?"


class Letters:
    """Encodes every character as a token, and its template repeats the message."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
        assert not tokenize and [message["role"] for message in messages] == ["user"]
        return f"[about: {messages[0]['content']}][user: {messages[0]['content']}][end]"

    def __call__(self, text: str, add_special_tokens: bool, return_offsets_mapping: bool) -> dict[str, Any]:
        assert return_offsets_mapping and not add_special_tokens
        return {"input_ids": self.encode(text), "offset_mapping": [(at, at + 1) for at in range(len(text))]}


def read(part: Part) -> str:
    return "".join(chr(part.tokens[place]) for place in part.counted)


def test_only_the_sentence_of_a_chat_message_counts() -> None:
    part = message(Letters(), SENTENCE)
    assert read(part) == SENTENCE
    assert "".join(map(chr, part.tokens[part.counted.stop :])) == "][end]", "the message, not its repetition before it"


def test_every_token_after_the_first_counts_where_there_is_no_template() -> None:
    assert whole([5, 6, 7]) == Part([5, 6, 7], range(1, 3))
    text = f"{SENTENCE} Too short. The third one is long enough."
    sentences = parts_of(Letters(), "sentences", 0, text)
    assert [read(part) for part in sentences] == [SENTENCE[1:], "he third one is long enough."]
    chat = parts_of(Letters(), "chat", 0, text)
    assert [read(part) for part in chat] == [SENTENCE, "The third one is long enough."]
    context = parts_of(Letters(), "context", 40, text)
    assert [len(part.tokens) for part in context] == [40, len(text) - 40]
    assert all(len(part.counted) == len(part.tokens) - 1 for part in context)


def test_tokens_are_found_by_their_characters() -> None:
    offsets = [(0, 4), (4, 6), (6, 6), (6, 9), (9, 12)]
    assert tokens_within(offsets, 4, 9) == range(1, 4)
    assert tokens_within(offsets, 5, 7) == range(1, 4), (
        "a token that begins before the text, and one that ends after it"
    )
    assert tokens_within(offsets, 0, 6) == range(1, 2), "nothing predicts the first token"
    assert tokens_within(offsets, 12, 20) == range(0)


def test_a_change_has_the_error_of_the_mean_difference() -> None:
    base, other = [-1.0, -2.0, -3.0, -4.0], [-1.1, -2.1, -3.3, -4.3]
    found = change_of(base, other)
    assert found.change == pytest.approx(math.exp(0.2) - 1)
    deviation = math.sqrt(4 * 0.1**2 / 3)
    assert found.error == pytest.approx(math.exp(0.2) * deviation / 2)
    assert change_of(base, base) == (0, 0)
    assert math.isnan(change_of([-1.0], [-2.0]).error)
    with pytest.raises(ValueError, match="shorter"):
        change_of(base, other[1:])
