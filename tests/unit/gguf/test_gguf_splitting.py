"""Each pre-tokenizer name of a GGUF file gives the tokens of the tokenizer that the name stands for.

The expected tokenizers are built here as in the models' own tokenizer.json. The vocabulary is trained on text without
pre-tokenization, so it has tokens across word boundaries, and a wrong pre-tokenizer gives different tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from vllm_backplane.errors import CheckpointError
from vllm_backplane.gguf import tokenizer as made
from vllm_backplane.gguf.model_files import open_model

TEXTS = (
    "It's 12345 o'clock; WE'LL see, they've 3.14159 and I'd 7.",
    "  Two spaces, three   spaces, a tab\tand\r\n\r\n new lines \n \n  at the end   ",
    "camelCase and SCREAMING_CASE, Zürich, cafe\u0301 and café, naïve ÉCOLE",
    "東京タワー was 333 m, Москва, ١٢٣٤, ½ ² Ⅷ, हिन्दी",
    "def f(x):\n    return x ** 2  # 🤖👩\u200d👩\u200d👧 a//b/c!\n/x <|end|>tail",
    "",
    "\n",
    " ",
    "1",
    "xyzzy plugh",
)

WHOLE = "Ġplugh"
"""A token of the vocabulary that no sequence of merges produces."""

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], Any]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


class Expected(NamedTuple):
    pre_tokenizer: Callable[[], Any]
    pieces: str
    """How PROBE is split, derived by hand."""
    nfc: bool = False
    ignore_merges: bool = False


PROBE = "WE'LL camelCase 1234!\n/x"
_GPT2 = Expected(_gpt2, "WE ' LL ĠcamelCase Ġ1234 ! Ċ / x")
_DIGITS = Expected(_digits, "WE ' LL ĠcamelCase Ġ 1 2 3 4 ! Ċ / x")
_LLAMA3 = Expected(_split(CL100K), "WE 'LL ĠcamelCase Ġ 123 4 !Ċ /x", ignore_merges=True)
_QWEN2 = Expected(_split(QWEN2), "WE 'LL ĠcamelCase Ġ 1 2 3 4 !Ċ /x", nfc=True)

NAMES = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _LLAMA3._replace(ignore_merges=False),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": Expected(_split(TEKKEN), "WE 'LL Ġcamel Case Ġ 1 2 3 4 !Ċ/ x", ignore_merges=True),
    "gpt-4o": Expected(_split(O200K), "WE'LL Ġcamel Case Ġ 123 4 !Ċ/ x"),
}


class Vocabulary(NamedTuple):
    ids: dict[str, int]
    merges: list[tuple[str, str]]


@cache
def vocabulary() -> Vocabulary:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        [*TEXTS[:5]] * 3, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    )
    state = json.loads(trained.to_str())["model"]
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in state["merges"]]
    return Vocabulary({**state["vocab"], WHOLE: len(state["vocab"])}, merges)


def expected(wanted: Expected) -> Any:
    known = vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=known.ids, merges=known.merges, ignore_merges=wanted.ignore_merges))
    if wanted.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = wanted.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def written(folder: Path, name: str | None) -> Any:
    """Writes a file with the vocabulary and the pre-tokenizer `name`, and returns the tokenizer made from the file."""
    known = vocabulary()
    tokens = sorted(known.ids, key=lambda token: known.ids[token])
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    if name is not None:
        writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types([made.CONTROL if token == "<|end|>" else made.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in known.merges])
    writer.add_add_bos_token(False)
    writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made.write(open_model(folder / "m.gguf"), folder, 128)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_every_name_that_is_known_is_looked_at() -> None:
    assert set(NAMES) == set(made.PRE_TOKENIZERS)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_tokenizer_that_the_name_stands_for(tmp_path: Path, name: str) -> None:
    wanted, ours = NAMES[name], written(tmp_path, name)
    theirs = expected(wanted)
    for text in TEXTS:
        found = ours.encode(text)
        assert found.ids == theirs.encode(text).ids, text
        if not wanted.nfc:
            assert ours.decode(found.ids, skip_special_tokens=False) == text
    assert [piece for piece, _place in ours.pre_tokenizer.pre_tokenize_str(PROBE)] == wanted.pieces.split(" ")
    assert (WHOLE in ours.encode("xyzzy plugh").tokens) is wanted.ignore_merges


def test_the_texts_distinguish_the_splittings() -> None:
    """Otherwise equal tokens would not show that the right pre-tokenizer is used."""
    kinds = {
        name: tuple(tuple(expected(NAMES[name]).encode(text).ids) for text in TEXTS)
        for name in ("gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o")
    }
    assert len(set(kinds.values())) == len(kinds)


@pytest.mark.parametrize("name", ["glm4", "qwen35", "default"])
def test_an_unknown_name_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"pre-tokenizer is '{name}'.*served are gpt-2, .*gpt-4o; use"):
        written(tmp_path, name)


def test_a_file_that_names_none_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not name its pre-tokenizer .*tokenizer\.ggml\.pre.*current"):
        written(tmp_path, None)
