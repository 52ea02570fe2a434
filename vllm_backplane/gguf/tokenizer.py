"""The tokenizer of a GGUF file as the files of a Hugging Face folder.

A file has the vocabulary, merges or scores, and a name for how text is split before. transformers splits every
byte-level vocabulary as GPT-2 did, whatever that name; here the name decides, and one that is not known is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_backplane.errors import CheckpointError, shown

if TYPE_CHECKING:
    from vllm_backplane.gguf.model_files import Gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SINCE_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _cased(digits: str, ending: str = "") -> str:
    """Words end where capitals begin."""
    before, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Splitting(NamedTuple):
    pattern: str
    digits_first: bool = False
    """Digits are separated one by one before the pattern applies."""
    whole_words: bool = False
    """A word that is in the vocabulary is taken whatever the merges say."""
    bos: bool = False
    """Texts begin with the first token, where the file does not say."""
    compose: bool = False
    """Unicode is composed first (NFC)."""


_LLAMA3 = Splitting(_SINCE_GPT4.format(digits="{1,3}"), whole_words=True, bos=True)
_QWEN2 = Splitting(_SINCE_GPT4.format(digits=""), compose=True)

SPLITTINGS: Mapping[str, Splitting] = {
    "gpt-2": Splitting(_GPT2),
    "phi-2": Splitting(_GPT2),
    "smollm": Splitting(_GPT2, digits_first=True),
    "starcoder": Splitting(_GPT2, digits_first=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": Splitting(_SINCE_GPT4.format(digits="{1,3}")),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": Splitting(_cased(r"\p{N}"), whole_words=True, bos=True),
    "gpt-4o": Splitting(_cased(r"\p{N}{1,3}", _ENDING)),
}
"""By tokenizer.ggml.pre."""

ENDINGS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>")
"""Tokens that end an answer in one chat format or another; files name only one of theirs."""

_SPACE = "\u2581"

_LONGEST = 512
"""Characters of a token; those of published vocabularies have up to about a hundred."""
_ALTOGETHER = 1 << 23
"""Characters of a vocabulary. The largest that are published have two million."""
_LOOKED_FOR = 1 << 20
"""Of those, characters of tokens that texts are searched for; the search takes some 80 bytes for each."""


class _Vocabulary(NamedTuple):
    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int]


def write(model: Gguf, folder: Path, model_max_length: int) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json; nothing where the file has no tokenizer."""
    kind = model.text("tokenizer.ggml.model")
    if kind is None or kind in ("none", "no_vocab"):
        return
    makers = {"gpt2": _byte_level, "llama": _sentence_pieces}
    if kind not in makers:
        raise _fault(model, f"its tokenizer is of kind {shown(kind)}, and {' and '.join(makers)} are served")
    vocabulary = _vocabulary(model)
    tokenizer = makers[kind](model, vocabulary)
    _add_special(tokenizer, vocabulary)
    special = {name: _special(model, vocabulary, key) for name, key in _SPECIAL.items()}
    if special["bos_token"] is not None and _adds_bos(model, kind):
        _begin_with(tokenizer, special["bos_token"], vocabulary.ids[special["bos_token"]])
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
    endings = {vocabulary.ids[token] for token in ENDINGS if token in vocabulary.ids and _is_special(vocabulary, token)}
    stated = [model.number(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    endings |= {number for number in stated if number is not None and number < len(vocabulary.tokens)}
    if endings:
        _write(folder / "generation_config.json", {"eos_token_id": sorted(endings)})


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _fault(model: Gguf, what: str) -> CheckpointError:
    return CheckpointError(f"{model.path} cannot be served: {what}; make it anew with a current converter")


def _vocabulary(model: Gguf) -> _Vocabulary:
    tokens, kinds = model.words("tokenizer.ggml.tokens"), model.numbers("tokenizer.ggml.token_type", whole=True)
    if not tokens:
        raise _fault(model, "it has no vocabulary (tokenizer.ggml.tokens)")
    # Scored pieces are tried at each of their characters, which takes the square of their length.
    longest = max(map(len, tokens))
    if longest > _LONGEST:
        raise _fault(model, f"a token of its vocabulary has {longest} characters, and {_LONGEST} are possible")
    if (characters := sum(map(len, tokens))) > _ALTOGETHER:
        raise _fault(model, f"its vocabulary has {characters} characters, and {_ALTOGETHER} are possible")
    numbers = [NORMAL] * len(tokens) if kinds is None else kinds
    if len(numbers) != len(tokens):
        raise _fault(model, f"it has {len(tokens)} tokens and {len(numbers)} kinds of tokens")
    special = sum(len(token) for token, kind in zip(tokens, numbers, strict=True) if kind in (CONTROL, USER_DEFINED))
    if special > _LOOKED_FOR:
        raise _fault(model, f"its control tokens have {special} characters, and {_LOOKED_FOR} are possible")
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise _fault(model, "a word is in its vocabulary twice")
    return _Vocabulary(tokens, numbers, ids)


def _special(model: Gguf, vocabulary: _Vocabulary, key: str) -> str | None:
    number = model.number(f"tokenizer.ggml.{key}_token_id")
    if number is None:
        return None
    if not 0 <= number < len(vocabulary.tokens):
        raise _fault(model, f"its {key} token is {number} of {len(vocabulary.tokens)}")
    return vocabulary.tokens[number]


def _is_special(vocabulary: _Vocabulary, token: str) -> bool:
    return vocabulary.kinds[vocabulary.ids[token]] in (CONTROL, USER_DEFINED)


def _adds_bos(model: Gguf, kind: str) -> bool:
    stated = model.truth("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return stated
    return True if kind == "llama" else _splitting(model).bos


def _splitting(model: Gguf) -> Splitting:
    name = model.text("tokenizer.ggml.pre")
    if not name:
        raise _fault(model, "it does not say how its tokenizer splits text (tokenizer.ggml.pre)")
    if name not in SPLITTINGS:
        raise CheckpointError(
            f"{model.path} cannot be served: its tokenizer splits text as {shown(name)}, and known are "
            f"{', '.join(SPLITTINGS)}; use the model's original checkpoint"
        )
    return SPLITTINGS[name]


def _byte_level(model: Gguf, vocabulary: _Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    splitting = _splitting(model)
    raw = model.words("tokenizer.ggml.merges")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in raw or ())]
    if raw is None:
        raise _fault(model, "it has no merges (tokenizer.ggml.merges)")
    known = vocabulary.ids
    for left, right in merges:
        if left not in known or right not in known or left + right not in known:
            raise _fault(model, f"it merges {shown(left)} and {shown(right)}, which are not all in its vocabulary")
    tokenizer = Tokenizer(models.BPE(vocab=known, merges=merges, ignore_merges=splitting.whole_words))
    if splitting.compose:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.digits_first else []
    steps += [
        pre_tokenizers.Split(Regex(splitting.pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(model: Gguf, vocabulary: _Vocabulary) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = model.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise _fault(model, "its vocabulary has no scores (tokenizer.ggml.scores)")
    unknown = next((token for token, kind in zip(*vocabulary[:2], strict=True) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges(vocabulary, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.kinds,
        )
    )
    prefix = model.truth("tokenizer.ggml.add_space_prefix") is not False
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Two pieces are merged where they make a piece; better scores first, as SentencePiece does."""
    pieces = {
        token: number
        for number, (token, kind) in enumerate(zip(*vocabulary[:2], strict=True))
        if kind in (NORMAL, USER_DEFINED, UNUSED)
    }
    found = []
    for token, number in pieces.items():
        if vocabulary.kinds[number] != NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = pieces.get(token[:cut]), pieces.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[number], number, left, right))
    found.sort()
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _score, _number, left, right in found]


def _add_special(tokenizer: Any, vocabulary: _Vocabulary) -> None:
    from tokenizers import AddedToken

    chosen = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(*vocabulary[:2], strict=True)
        if kind in (CONTROL, USER_DEFINED) and token
    ]
    tokenizer.add_tokens(chosen)


def _begin_with(tokenizer: Any, token: str, number: int) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", token, "$B:1"], special_tokens=[(token, number)]
    )
