"""Tests the configuration, the tokenizer and the folder that are made from a GGUF file for vLLM."""

from __future__ import annotations

import itertools
import json
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests import gguf_bytes
from vllm_backplane.errors import BackplaneError, CheckpointError
from vllm_backplane.gguf import tokenizer as vocabularies
from vllm_backplane.gguf.architectures import ARCHITECTURES, checkpoint_tensors
from vllm_backplane.gguf.config_folder import config_folder, open_source
from vllm_backplane.gguf.hf_config import configuration
from vllm_backplane.gguf.model_files import is_model, open_model

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  Two spaces, a tab\tand\n\n new lines; it's 12345 o'clock in Zürich — 東京.",
    "def f(x):\n    return x ** 2  # naïve café 🤖",
]

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pre-tokenizer pattern in the tokenizer.json of Qwen2."""

SIZES: dict[str, Any] = {
    "context_length": 128,
    "embedding_length": 32,
    "block_count": 1,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def shapes(vocabulary: int, queries: int) -> dict[str, tuple[int, ...]]:
    return {
        "token_embd": (vocabulary, 32),
        "output_norm": (32,),
        **{f"blk.0.{norm}": (32,) for norm in ("attn_norm", "ffn_norm")},
        "blk.0.attn_q": (queries, 32),
        **{f"blk.0.{part}": (queries // 2, 32) for part in ("attn_k", "attn_v")},
        "blk.0.attn_output": (32, queries),
        **{f"blk.0.{part}": (64, 32) for part in ("ffn_gate", "ffn_up")},
        "blk.0.ffn_down": (32, 64),
    }


def write(
    path: Path,
    architecture: str = "llama",
    tokenizer: dict[str, Any] | None = None,
    queries: int = 32,
    rows: int = 0,
    tensors: dict[str, tuple[int, ...] | None] | None = None,
    matrices: type[np.floating[Any]] = np.float32,
    values: dict[str, float] | None = None,
    **changes: Any,
) -> Path:
    """Writes a file of one layer with the shapes of SIZES.

    `changes` are metadata with two underscores for dots; None omits a key. `queries` is the number of rows of attn_q,
    and `rows` that of the embedding if it is not one per token. `tensors` has other shapes; None omits a tensor.
    `values` has the value of all elements of a tensor if it is not 1.
    """
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {**SIZES, **{key.replace("__", "."): value for key, value in changes.items()}}
    for key, value in sizes.items():
        if value is not None:
            _add(writer, f"{architecture}.{key}", value)
    for key, value in (tokenizer or {}).items():
        _add(writer, f"tokenizer.{key}", value)
    words = (tokenizer or {}).get("ggml.tokens")
    rows = rows or (len(words) if isinstance(words, list) else 8)
    for name, shape in {**shapes(rows, queries), **(tensors or {})}.items():
        if shape is not None:
            full = name if name.endswith(".bias") else f"{name}.weight"
            kind = matrices if len(shape) > 1 else np.float32
            writer.add_tensor(full, np.full(shape, (values or {}).get(name, 1), kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, key: str, value: Any) -> None:
    adders = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    getattr(writer, f"add_{adders[type(value)]}")(key, value)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BACKPLANE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_configuration_has_the_values_of_the_file(tmp_path: Path) -> None:
    made = configuration(open_model(write(tmp_path / "m.gguf", rope__freq_base=500000.0)))
    assert made["hidden_size"] == 32 and made["vocab_size"] == 8 and made["head_dim"] == 8
    assert made["num_key_value_heads"] == 2 and made["rms_norm_eps"] == 1e-5
    assert made["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    assert made["tie_word_embeddings"] is True
    wide = configuration(open_model(write(tmp_path / "m.gguf", queries=64, rope__dimension_count=16)))
    assert wide["head_dim"] == 16, "from the weights, where the metadata has no head size"


def test_a_file_in_half_precision_has_dtype_float16(tmp_path: Path) -> None:
    """vLLM's `--dtype auto` rounds a float32 model to bfloat16."""
    assert configuration(open_model(write(tmp_path / "m.gguf", matrices=np.float16)))["torch_dtype"] == "float16"
    assert configuration(open_model(write(tmp_path / "m.gguf")))["torch_dtype"] == "float32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "block_count"),
        ({"block_count": 0}, "block_count"),
        ({"embedding_length": 48}, "embedding"),
        ({"attention__head_count": [4, 4]}, "attention.head_count"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "epsilon"),
        ({"attention__layer_norm_rms_epsilon": None}, "epsilon"),
        ({"context_length": "long"}, "context_length"),
        ({"context_length": 1 << 31}, "context_length"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "yarn"),
        ({"rope__dimension_count": 4}, "rotated"),
        # Far more than the tensors have: vLLM would allocate memory for all of it before it loads a tensor.
        ({"block_count": 1_000_000}, "1000000 layers"),
        ({"block_count": 2}, "has 2 layers .* does not match its tensors of 1 layers"),
        ({"context_length": 10_000_000}, "context_length is 10000000"),
        (
            {"context_length": 1 << 20, "rope__scaling__type": "linear", "rope__scaling__factor": 1e5},
            "scaled by 100000",
        ),
        ({"feed_forward_length": (1 << 31) - 1}, "feed_forward_length"),
        ({"feed_forward_length": 1 << 20}, r"blk.0.ffn_gate.weight has the shape \(64, 32\)"),
        ({"attention__head_count": (1 << 31) - 1}, "attention.head_count"),
        ({"attention__head_count": 1 << 20}, "1048576 heads of size 0"),
        ({"attention__head_count": 2}, "attn_k.weight has the shape"),
        ({"attention__head_count_kv": 1}, r"attn_k.weight has the shape \(16, 32\), .* requires \(8, 32\)"),
        ({"attention__head_count_kv": 3}, "4 attention heads are not a multiple of its 3"),
        ({"attention__key_length": 1 << 20}, "attn_q.weight has the shape"),
        ({"attention__key_length": 7}, "4 heads of size 7"),
        ({"rope__freq_base": -1.0}, "freq_base"),
        ({"rope__freq_base": 1e-45}, "freq_base is 1.4013e-45, not from 1 to 1e"),
        ({"rope__freq_base": 3e38}, "freq_base is 3e"),
        ({"rope__scaling__factor": 1e-30}, "factor is 1e-30"),
        ({"attention__layer_norm_rms_epsilon": 0.5}, "epsilon is 0.5, not from 1e-13 to 0.01"),
        ({"attention__layer_norm_rms_epsilon": 1e-30}, "epsilon is 1e-30"),
        ({"rope__scaling__factor": -2.0}, "factor"),
        ({"tokenizer": {"ggml.tokens": ["a"] * 9}, "rows": 8}, "9 tokens, and its embedding 8 rows"),
        ({"tensors": {"output": (9, 32)}}, "output.weight has the shape"),
        ({"tensors": {"output_norm": (31,)}}, "output_norm.weight has the shape"),
        ({"tensors": {"blk.0.attn_norm": None}}, "no blk.0.attn_norm.weight"),
        ({"tensors": {"output_norm": None}}, "no output_norm.weight"),
        ({"tensors": {"blk.0.attn_q.bias": (32,), "blk.0.attn_v.bias": (16,)}}, "no blk.0.attn_k.bias"),
        ({"tensors": {"blk.7.attn_norm": (32,)}}, "has 1 layers .* does not match its tensors of 2 layers"),
        ({"tensors": {"rope_freqs": (5,)}}, "rope_freqs.weight is not 4 factors in F32"),
        ({"tensors": {"rope_freqs": (1, 3)}, "matrices": np.float16}, "rope_freqs.weight is not 4 factors in F32"),
        ({"tensors": {"rope_freqs": (4,)}, "rope__freq_base": 5e5}, "not those of Llama 3.1 or 3.2"),
        (
            {"tensors": {"rope_freqs": (4,)}, "values": {"rope_freqs": -1.0}},
            "rope_freqs.weight has the factor -1, not from 0.01 to 100000",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        configuration(open_model(write(tmp_path / "m.gguf", **changes)))


_PHI2_TENSORS: dict[str, tuple[int, ...] | None] = {
    "blk.0.ffn_norm": None,
    "blk.0.ffn_gate": None,
    "output": (8, 32),
    "output.bias": (8,),
    "output_norm.bias": (32,),
    "blk.0.attn_norm.bias": (32,),
    "blk.0.attn_q.bias": (32,),
    "blk.0.attn_k.bias": (16,),
    "blk.0.attn_v.bias": (16,),
    "blk.0.attn_output.bias": (32,),
    "blk.0.ffn_up.bias": (64,),
    "blk.0.ffn_down.bias": (32,),
}
_PHI2_FUSED: dict[str, tuple[int, ...] | None] = {
    **{f"blk.0.attn_{part}{kind}": None for part in "qkv" for kind in ("", ".bias")},
    "blk.0.attn_qkv": (64, 32),
    "blk.0.attn_qkv.bias": (64,),
}


def phi2(path: Path, **tensors: tuple[int, ...] | None) -> Path:
    """Writes a Phi-2 file: half of the 8 features of a head are rotated, and norms subtract the mean."""
    sizes = {"attention__layer_norm_epsilon": 1e-5, "attention__layer_norm_rms_epsilon": None}
    return write(path, "phi2", tensors={**_PHI2_TENSORS, **tensors}, rope__dimension_count=4, **sizes)


@pytest.mark.parametrize(
    ("tensors", "queries"), [({}, "q_proj"), (_PHI2_FUSED, "qkv_proj")], ids=["three matrices", "one matrix"]
)
def test_phi2_has_biases_and_rotates_a_part(
    tmp_path: Path, tensors: dict[str, tuple[int, ...] | None], queries: str
) -> None:
    model = open_model(phi2(tmp_path / "m.gguf", **tensors))
    made = configuration(model)
    assert made["architectures"] == ["PhiForCausalLM"] and made["hidden_act"] == "gelu_new"
    assert made["layer_norm_eps"] == 1e-5 and "rms_norm_eps" not in made and not made["tie_word_embeddings"]
    assert made["rope_parameters"]["partial_rotary_factor"] == 0.5
    names = {one.name for one in checkpoint_tensors(model)}
    assert {"model.final_layernorm.bias", "lm_head.bias", f"model.layers.0.self_attn.{queries}.bias"} <= names


@pytest.mark.parametrize("missing", ["output", "output.bias", "output_norm.bias", "blk.0.ffn_up.bias"])
def test_phi2_without_one_of_its_biases_is_refused(tmp_path: Path, missing: str) -> None:
    with pytest.raises(CheckpointError, match=rf"it has no {re.escape(missing)}"):
        configuration(open_model(phi2(tmp_path / "m.gguf", **{missing: None})))


def phi3(path: Path, **values: float) -> Path:
    """Writes a Phi-3 file whose context is extended by factors (longrope), with given values of all factors."""
    return write(
        path,
        "phi3",
        tensors={
            **{f"blk.0.{part}": None for part in ("attn_q", "attn_k", "attn_v", "ffn_gate")},
            "blk.0.attn_qkv": (64, 32),
            "blk.0.ffn_up": (128, 32),
            "rope_factors_short": (4,),
            "rope_factors_long": (4,),
        },
        values=values,
        attention__key_length=8,
        rope__scaling__original_context_length=16,
    )


def test_phi3_has_the_factors_of_the_file(tmp_path: Path) -> None:
    made = configuration(open_model(phi3(tmp_path / "m.gguf", rope_factors_long=64.0)))
    rope = made["rope_parameters"]
    assert rope["short_factor"] == [1.0] * 4 and rope["long_factor"] == [64.0] * 4


@pytest.mark.parametrize("name", ["rope_factors_short", "rope_factors_long"])
@pytest.mark.parametrize("value", [1e-45, 1e-30, 3e38, 0.0, -1.0, float("inf"), float("nan")])
def test_factors_that_cannot_be_meant_are_refused(tmp_path: Path, name: str, value: float) -> None:
    """Tests values that would make the rotary frequencies infinite, zero or NaN."""
    expected = re.escape(f"its {name}.weight has the factor {np.float32(value):g}, not from 0.01 to 100000")
    with pytest.raises(CheckpointError, match=expected):
        configuration(open_model(phi3(tmp_path / "m.gguf", **{name: value})))


def test_another_architecture_is_refused_with_those_that_are_served(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'mamba'.*" + ".*".join(ARCHITECTURES)):
        config_folder(write(tmp_path / "m.gguf", "mamba"))
    with pytest.raises(CheckpointError, match="mixture of experts"):
        config_folder(write(tmp_path / "m.gguf", "qwen2", expert_count=4))


def test_a_folder_is_made_once_and_again_when_it_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    folder = config_folder(path)
    config, made = folder / "config.json", (folder / "config.json").stat().st_mtime_ns
    assert config_folder(path) == folder and config.stat().st_mtime_ns == made
    whole = config.read_text()
    config.write_text(whole.replace("32", "33"))  # of the same length
    assert config_folder(path) == folder and config.read_text() == whole
    (folder / "backplane-manifest.json").unlink()
    assert config_folder(path) == folder and config.read_text() == whole


def test_a_file_that_changed_is_another_model(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    folder = config_folder(path)
    declared = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert open_source(declared).path == path
    write(path, context_length=64)
    with pytest.raises(CheckpointError, match="has changed"):
        open_source(declared)
    assert config_folder(path) != folder


def test_paths_that_are_no_models_are_left_to_vllm(tmp_path: Path) -> None:
    assert not is_model("org/model") and not is_model(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert is_model(tmp_path) and is_model(tmp_path / "m.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert is_model(tmp_path), "other programs expect a config.json beside a GGUF file"


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model-00001-of-00002.bin", "model.pt", "model.pth"])
def test_a_folder_with_other_weights_is_left_to_vllm(tmp_path: Path, weights: str) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / weights).touch()
    assert not is_model(tmp_path)


def ours(folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("name", "pattern", "digits"),
    [
        ("gpt-2", None, False),
        ("smollm", None, True),
        ("qwen2", QWEN2, False),
    ],
)
def test_byte_level_vocabularies_split_as_their_pre_tokenizer_does(
    tmp_path: Path, name: str, pattern: str | None, digits: bool
) -> None:
    """Compares with a tokenizer that the tokenizers library trained, with the library's own split for GPT-2."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    first = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    first = [pre_tokenizers.Digits(individual_digits=True)] if digits else first
    trained.pre_tokenizer = pre_tokenizers.Sequence([*first, level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    )
    state = json.loads(trained.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in state["merges"]]
    tokenizer = {
        "ggml.model": "gpt2",
        "ggml.pre": name,
        "ggml.tokens": tokens,
        "ggml.token_type": [3 if token == "<|end|>" else 1 for token in tokens],
        "ggml.merges": merges,
        "ggml.eos_token_id": 0,
        "chat_template": "{{ messages }}",
    }
    folder = config_folder(write(tmp_path / "m.gguf", tokenizer=tokenizer))
    made = ours(folder)
    for text in [*TEXTS, "unseen words: xyzzy 77 <|end|>tail"]:
        assert made.encode(text).ids == trained.encode(text).ids
        assert made.decode(made.encode(text).ids, skip_special_tokens=False) == text
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ messages }}" and settings["eos_token"] == "<|end|>"
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [0]}
    with pytest.raises(CheckpointError, match="'babble'"):
        config_folder(write(tmp_path / "m.gguf", tokenizer={**tokenizer, "ggml.pre": "babble"}))
    with pytest.raises(CheckpointError, match="merges"):
        config_folder(write(tmp_path / "m.gguf", tokenizer={**tokenizer, "ggml.merges": ["no such"]}))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("text", ["<s>", "<s>:x", "<s>:1", "$A", "$B", "$1", "$", ":", "$A:1", "a b", "ab"])
def test_the_text_of_a_bos_token_is_no_template(tmp_path: Path, kind: str, text: str) -> None:
    tokenizer = {
        "ggml.model": kind,
        "ggml.pre": "gpt-2",
        "ggml.tokens": ["<unk>", "x", "y", text, "xx"],
        "ggml.token_type": [2, 1, 1, 3, 1],
        "ggml.scores": [0.0] * 5,
        "ggml.merges": ["x x"],
        "ggml.bos_token_id": 3,
        "ggml.add_bos_token": True,
        "ggml.add_space_prefix": False,
    }
    made = ours(config_folder(write(tmp_path / "m.gguf", tokenizer=tokenizer)))
    assert made.encode("xy").ids == [3, 1, 2]
    assert made.encode("xy").tokens == [text, "x", "y"]
    assert made.encode("x", "y").ids == [3, 1, 3, 2]
    assert made.encode("xy", add_special_tokens=False).ids == [1, 2]


def test_a_file_with_a_long_name_is_served(tmp_path: Path) -> None:
    assert config_folder(write(tmp_path / ("ü" * 120 + ".gguf"))).is_dir()


@pytest.mark.parametrize("prefix", [True, False])
def test_scored_vocabularies_encode_as_sentencepiece_does(tmp_path: Path, prefix: bool) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=360,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        add_dummy_prefix=prefix,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    trained = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    numbers = range(trained.vocab_size())
    kinds = [
        2 if trained.is_unknown(one) else 3 if trained.is_control(one) else 6 if trained.is_byte(one) else 1
        for one in numbers
    ]
    tokenizer = {
        "ggml.model": "llama",
        "ggml.tokens": [trained.id_to_piece(one) for one in numbers],
        "ggml.scores": [float(trained.get_score(one)) for one in numbers],
        "ggml.token_type": kinds,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        "ggml.add_space_prefix": prefix,
    }
    made = ours(config_folder(write(tmp_path / "m.gguf", tokenizer=tokenizer)))
    for text in [*TEXTS, "unseen words: xyzzy 77 ß"]:
        assert made.encode(text).ids == [1, *trained.encode(text)]
        assert made.decode(made.encode(text).ids) == text


WRONG: tuple[Any, ...] = (0, 3000000000, 0.5, float("nan"), "word", True, [1, 2], ["a", "b"], [0.5, float("inf")])

SOUND: dict[str, Any] = {
    "ggml.model": "gpt2",
    "ggml.pre": "gpt-2",
    "ggml.tokens": ["a", "b", "ab", "<s>"],
    "ggml.token_type": [1, 1, 1, 3],
    "ggml.scores": [0.0, -1.0, -2.0, 0.0],
    "ggml.merges": ["a b"],
    "ggml.bos_token_id": 3,
    "ggml.eos_token_id": 3,
    "ggml.unknown_token_id": 3,
    "ggml.padding_token_id": 3,
    "ggml.eot_token_id": 3,
    "ggml.add_bos_token": True,
    "ggml.add_space_prefix": True,
    "chat_template": "{{ messages }}",
}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_metadata_of_a_wrong_kind_is_used_or_refused(tmp_path: Path, kind: str) -> None:
    sound = {**SOUND, "ggml.model": kind}
    assert (config_folder(write(tmp_path / "m.gguf", tokenizer=sound)) / "tokenizer.json").exists()
    refused = 0
    for key in sound:
        for value in (*WRONG, ["a", "b", "", "<s>"], ["", "", "", ""], ["a  b"], [9, 9, 9, 9]):
            path = write(tmp_path / "m.gguf", tokenizer={**sound, key: value})
            try:
                config_folder(path)
            except CheckpointError:
                refused += 1
    for key in (*SIZES, "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.dimension_count"):
        for value in WRONG:
            try:
                config_folder(write(tmp_path / "m.gguf", **{key.replace(".", "__"): value}))
            except CheckpointError:
                refused += 1
    assert refused > 100


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_vocabulary_beyond_all_measure_is_refused(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scored token is split at each of its characters: a token of 16 MiB would take hours."""
    sound = {**SOUND, "ggml.model": kind}
    with pytest.raises(CheckpointError, match="has 513 characters, more than the limit of 512"):
        config_folder(write(tmp_path / "m.gguf", tokenizer={**sound, "ggml.tokens": ["a", "b", "ab", "x" * 513]}))
    monkeypatch.setattr("vllm_backplane.gguf.tokenizer._MAX_SPECIAL_CHARACTERS", 2)
    with pytest.raises(CheckpointError, match="control tokens have 3 characters, more than the limit of 2"):
        config_folder(write(tmp_path / "m.gguf", tokenizer=sound))
    monkeypatch.setattr("vllm_backplane.gguf.tokenizer._MAX_VOCABULARY_CHARACTERS", 6)
    with pytest.raises(CheckpointError, match="vocabulary has 7 characters, more than the limit of 6"):
        config_folder(write(tmp_path / "m.gguf", tokenizer=sound))
    monkeypatch.setattr("vllm_backplane.gguf.tokenizer._MAX_TOKENS", 3)
    with pytest.raises(CheckpointError, match="vocabulary has 4 tokens, more than the limit of 3"):
        config_folder(write(tmp_path / "m.gguf", tokenizer=sound))


def test_merges_beyond_all_measure_are_refused(tmp_path: Path) -> None:
    """Tests all words of two letters: each is made of two others in as many ways as it has places to cut. The 2^17
    words of up to 16 letters already have 1.8 million merges."""
    words = ["".join(letters) for size in range(1, 17) for letters in itertools.product("ab", repeat=size)]
    scores = {"ggml.token_type": [1] * len(words), "ggml.scores": [0.0] * len(words)}
    tokenizer = {"ggml.model": "llama", "ggml.tokens": words, **scores}
    model = open_model(write(tmp_path / "m.gguf", tokenizer=tokenizer))
    with pytest.raises(CheckpointError, match="more than 524280 merges for 131070 tokens, which is the limit"):
        vocabularies.write(model, tmp_path, 128)
    merges = {**SOUND, "ggml.merges": ["a b"] * 65537}
    with pytest.raises(CheckpointError, match="has 65537 merges for 4 tokens, and the limit is 65536"):
        config_folder(write(tmp_path / "m.gguf", tokenizer=merges))


LONG = "long" * (1 << 20)
LONG_TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({}, "architecture 'long.*Served: llama"),
    "RoPE scaling": ({"rope__scaling__type": LONG}, "RoPE scaling 'long"),
    "tokenizer model": ({"tokenizer": {**SOUND, "ggml.model": LONG}}, "tokenizer model is 'long"),
    "pre-tokenizer": ({"tokenizer": {**SOUND, "ggml.pre": LONG}}, "pre-tokenizer is 'long"),
    "merges": ({"tokenizer": {**SOUND, "ggml.merges": [f"a {LONG}"]}}, "merges 'a' and 'long"),
}


@pytest.mark.parametrize("case", LONG_TEXTS)
def test_a_long_text_makes_a_short_message_and_takes_little_memory(tmp_path: Path, case: str) -> None:
    """A long text is not compared with similar names either, which would take 35 times its size."""
    changes, message = LONG_TEXTS[case]
    path = write(tmp_path / "m.gguf", **changes)
    if case == "architecture":
        declared = gguf_bytes.key("general.architecture", gguf_bytes.STRING, gguf_bytes.text(LONG))
        path.write_bytes(gguf_bytes.File(keys=[declared]).build())
    model = open_model(path)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message) as fault:
            vocabularies.write(model, tmp_path, configuration(model)["max_position_embeddings"])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(str(fault.value)) < 500 + len(str(path)) and peak < 3 * len(LONG)


@pytest.fixture
def temporary_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Unsets BACKPLANE_CACHE and returns the user's folder among temporary files."""
    monkeypatch.delenv("BACKPLANE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home/.cache"))
    (tmp_path / "home").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary" / f"vllm-backplane-{os.getuid()}"


def test_nothing_goes_to_the_users_home(tmp_path: Path, temporary_cache: Path) -> None:
    folder = config_folder(write(tmp_path / "m.gguf"))
    assert folder.parent == temporary_cache / "gguf"
    assert temporary_cache.stat().st_mode & 0o777 == 0o700
    assert config_folder(tmp_path / "m.gguf") == folder
    assert list((tmp_path / "home").iterdir()) == []


def test_a_folder_that_others_can_open_is_not_believed(tmp_path: Path, temporary_cache: Path) -> None:
    temporary_cache.mkdir()
    temporary_cache.chmod(0o755)
    with pytest.raises(BackplaneError, match=r"only you can read and write.* BACKPLANE_CACHE"):
        config_folder(write(tmp_path / "m.gguf"))


def test_a_link_to_a_folder_is_not_believed(tmp_path: Path, temporary_cache: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    temporary_cache.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BackplaneError, match="only you can read and write"):
        config_folder(write(tmp_path / "m.gguf"))


def test_a_folder_of_somebody_else_is_not_believed(
    tmp_path: Path, temporary_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_user = os.getuid() + 1
    temporary_cache.with_name(f"vllm-backplane-{other_user}").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: other_user)
    with pytest.raises(BackplaneError, match="only you can read and write"):
        config_folder(write(tmp_path / "m.gguf"))
