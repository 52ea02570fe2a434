"""Writes the tokenizer of a GGUF file as the tokenizer files of a Hugging Face folder.

A GGUF file has the vocabulary, merges or scores, and the name of a pre-tokenizer. transformers ignores that name and
pre-tokenizes every byte-level vocabulary as GPT-2 does. Here the name selects the pre-tokenizer, and an unknown name
raises an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_backplane.errors import CheckpointError, short_repr

if TYPE_CHECKING:
    from vllm_backplane.gguf.model_files import GgufModel

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SINCE_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _cased(digits: str, ending: str = "") -> str:
    """Returns a pattern that also splits words where upper case letters begin."""
    before, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class PreTokenizer(NamedTuple):
    """Describes how text is split before BPE, and the tokenizer settings that go with it."""

    pattern: str
    digits_first: bool = False
    """Digits are separated one by one before the pattern applies."""
    ignore_merges: bool = False
    """A word that is in the vocabulary becomes one token, whatever the merges are."""
    bos: bool = False
    """The BOS token is prepended where the file does not set add_bos_token."""
    nfc: bool = False
    """Text is normalized to NFC first."""


_LLAMA3 = PreTokenizer(_SINCE_GPT4.format(digits="{1,3}"), ignore_merges=True, bos=True)
_QWEN2 = PreTokenizer(_SINCE_GPT4.format(digits=""), nfc=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(_GPT2),
    "phi-2": PreTokenizer(_GPT2),
    "smollm": PreTokenizer(_GPT2, digits_first=True),
    "starcoder": PreTokenizer(_GPT2, digits_first=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": PreTokenizer(_SINCE_GPT4.format(digits="{1,3}")),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": PreTokenizer(_cased(r"\p{N}"), ignore_merges=True, bos=True),
    "gpt-4o": PreTokenizer(_cased(r"\p{N}{1,3}", _ENDING)),
}
"""Pre-tokenizers by tokenizer.ggml.pre."""

END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>")
"""Tokens that end a response in known chat formats. A file names only one EOS token even where its format has more."""

_SPACE = "\u2581"

_MAX_TOKEN_CHARACTERS = 512
"""Limit for one token; the longest tokens of published vocabularies have about a hundred characters."""
_MAX_VOCABULARY_CHARACTERS = 1 << 23
"""Limit for all tokens together; the largest published vocabularies have two million characters."""
_MAX_SPECIAL_CHARACTERS = 1 << 20
"""Limit for all special tokens together. Text is searched for them, which takes about 80 bytes per character."""
_MAX_TOKENS = 1 << 19
"""Limit for the tokens; each takes some 400 bytes of memory, and the largest served vocabularies have 2^18."""
_MIN_MERGES, _MERGES_PER_TOKEN = 1 << 16, 4
"""Limit for the merges of a vocabulary, whether they are in the file or follow from scores. Each takes some 200 bytes
of memory, and published vocabularies have two per token."""


class _Vocabulary(NamedTuple):
    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int]


def write(model: GgufModel, folder: Path, model_max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json into `folder`.

    Writes nothing if the file has no tokenizer.
    """
    kind = model.text("tokenizer.ggml.model")
    if kind is None or kind in ("none", "no_vocab"):
        return
    makers = {"gpt2": _byte_level, "llama": _sentence_pieces}
    if kind not in makers:
        raise _fault(model, f"its tokenizer model is {short_repr(kind)}; {' and '.join(makers)} are served")
    vocabulary = _vocabulary(model)
    tokenizer = makers[kind](model, vocabulary)
    _add_special(tokenizer, vocabulary)
    special = {name: _special(model, vocabulary, key) for name, key in _SPECIAL.items()}
    if special["bos_token"] is not None and _adds_bos(model, kind):
        _prepend(tokenizer, special["bos_token"], vocabulary.ids[special["bos_token"]])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "clean_up_tokenization_spaces": False,
        **{name: token for name, token in special.items() if token is not None},
    }
    template = model.text("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    _write(folder / "tokenizer_config.json", config)
    ids = vocabulary.ids
    end_ids = {ids[token] for token in END_TOKENS if token in ids and _is_special(vocabulary, token)}
    declared = [model.number(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    end_ids |= {number for number in declared if number is not None and number < len(vocabulary.tokens)}
    if end_ids:
        _write(folder / "generation_config.json", {"eos_token_id": sorted(end_ids)})


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _fault(model: GgufModel, what: str) -> CheckpointError:
    return CheckpointError(f"{model.path} cannot be served: {what}; convert the model again with a current converter")


def _vocabulary(model: GgufModel) -> _Vocabulary:
    declared = model.strings("tokenizer.ggml.tokens")
    if not declared:
        raise _fault(model, "it has no vocabulary (tokenizer.ggml.tokens)")
    if len(declared) > _MAX_TOKENS:
        raise _fault(model, f"its vocabulary has {len(declared)} tokens, more than the limit of {_MAX_TOKENS}")
    tokens, kinds = declared.tolist(), model.numbers("tokenizer.ggml.token_type", integers=True)
    # `_merges` splits every token at each of its characters, which takes quadratic time in the length of a token.
    longest = max(map(len, tokens))
    if longest > _MAX_TOKEN_CHARACTERS:
        raise _fault(
            model, f"a token of its vocabulary has {longest} characters, more than the limit of {_MAX_TOKEN_CHARACTERS}"
        )
    if (characters := sum(map(len, tokens))) > _MAX_VOCABULARY_CHARACTERS:
        raise _fault(
            model,
            f"its vocabulary has {characters} characters, more than the limit of {_MAX_VOCABULARY_CHARACTERS}",
        )
    numbers = [NORMAL] * len(tokens) if kinds is None else kinds
    if len(numbers) != len(tokens):
        raise _fault(model, f"it has {len(tokens)} tokens and {len(numbers)} token types (tokenizer.ggml.token_type)")
    special = sum(len(token) for token, kind in zip(tokens, numbers, strict=True) if kind in (CONTROL, USER_DEFINED))
    if special > _MAX_SPECIAL_CHARACTERS:
        raise _fault(
            model, f"its control tokens have {special} characters, more than the limit of {_MAX_SPECIAL_CHARACTERS}"
        )
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise _fault(model, "a token occurs twice in its vocabulary")
    return _Vocabulary(tokens, numbers, ids)


def _special(model: GgufModel, vocabulary: _Vocabulary, key: str) -> str | None:
    number = model.number(f"tokenizer.ggml.{key}_token_id")
    if number is None:
        return None
    if not 0 <= number < len(vocabulary.tokens):
        raise _fault(model, f"its {key} token has the id {number} in a vocabulary of {len(vocabulary.tokens)}")
    return vocabulary.tokens[number]


def _is_special(vocabulary: _Vocabulary, token: str) -> bool:
    return vocabulary.kinds[vocabulary.ids[token]] in (CONTROL, USER_DEFINED)


def _adds_bos(model: GgufModel, kind: str) -> bool:
    declared = model.boolean("tokenizer.ggml.add_bos_token")
    if declared is not None:
        return declared
    return True if kind == "llama" else _pre_tokenizer(model).bos


def _pre_tokenizer(model: GgufModel) -> PreTokenizer:
    name = model.text("tokenizer.ggml.pre")
    if not name:
        raise _fault(model, "it does not name its pre-tokenizer (tokenizer.ggml.pre)")
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{model.path} cannot be served: its pre-tokenizer is {short_repr(name)} (tokenizer.ggml.pre), and served "
            f"are {', '.join(PRE_TOKENIZERS)}; use the model's original checkpoint"
        )
    return PRE_TOKENIZERS[name]


def _byte_level(model: GgufModel, vocabulary: _Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre_tokenizer = _pre_tokenizer(model)
    raw = model.strings("tokenizer.ggml.merges")
    if raw is None:
        raise _fault(model, "it has no merges (tokenizer.ggml.merges)")
    if len(raw) > (limit := _most_merges(vocabulary)):
        raise _fault(model, f"it has {len(raw)} merges for {len(vocabulary.tokens)} tokens, and the limit is {limit}")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in raw)]
    known = vocabulary.ids
    for left, right in merges:
        if left not in known or right not in known or left + right not in known:
            pair = f"{short_repr(left)} and {short_repr(right)}"
            raise _fault(model, f"it merges {pair}; these tokens or their concatenation are not in its vocabulary")
    tokenizer = Tokenizer(models.BPE(vocab=known, merges=merges, ignore_merges=pre_tokenizer.ignore_merges))
    if pre_tokenizer.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre_tokenizer.digits_first else []
    steps += [
        pre_tokenizers.Split(Regex(pre_tokenizer.pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(model: GgufModel, vocabulary: _Vocabulary) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = model.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise _fault(model, "its vocabulary lacks scores (tokenizer.ggml.scores)")
    unknown = next((token for token, kind in zip(*vocabulary[:2], strict=True) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges(model, vocabulary, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.kinds,
        )
    )
    prefix = model.boolean("tokenizer.ggml.add_space_prefix") is not False
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(model: GgufModel, vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Returns the BPE merges that are equivalent to SentencePiece's scores.

    Two pieces are merged where their concatenation is a piece. Better scores come first. Raises CheckpointError for a
    vocabulary in which almost every piece consists of two others in many ways: the merges would take gigabytes.
    """
    limit = _most_merges(vocabulary)
    pieces = {
        token: number
        for number, (token, kind) in enumerate(zip(*vocabulary[:2], strict=True))
        if kind in (NORMAL, USER_DEFINED, UNUSED)
    }
    found: list[tuple[float, int, int, int]] = []
    for token, number in pieces.items():
        if vocabulary.kinds[number] != NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = pieces.get(token[:cut]), pieces.get(token[cut:])
            if left is not None and right is not None:
                if len(found) == limit:
                    count = len(vocabulary.tokens)
                    raise _fault(model, f"it has more than {limit} merges for {count} tokens, which is the limit")
                found.append((-scores[number], number, left, right))
    found.sort()
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _score, _number, left, right in found]


def _most_merges(vocabulary: _Vocabulary) -> int:
    return max(_MIN_MERGES, _MERGES_PER_TOKEN * len(vocabulary.tokens))


def _add_special(tokenizer: Any, vocabulary: _Vocabulary) -> None:
    from tokenizers import AddedToken

    chosen = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(*vocabulary[:2], strict=True)
        if kind in (CONTROL, USER_DEFINED) and token
    ]
    tokenizer.add_tokens(chosen)


def _prepend(tokenizer: Any, token: str, number: int) -> None:
    from tokenizers import processors

    # The template has a name of its own for the token: the token's text comes from the file, and `$` and `:` have a
    # meaning in templates.
    name = "bos"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[name, "$A"],
        pair=[name, "$A", name, "$B:1"],
        special_tokens=[{"id": name, "ids": [number], "tokens": [token]}],
    )
