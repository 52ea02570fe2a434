"""The parser, and what is made of its result, under a bounded, coverage-guided fuzzer: any bytes give a model or a
CheckpointError, and nothing else."""

from __future__ import annotations

import inspect
import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest
from gguf_bytes import ARRAY, BOOL, F32, F32_VALUE, STRING, U32, U64, File, array, f32, key, tensor, text, u32, u64
from guided import Coverage, fuzz
from test_gguf_hostile import HOSTILE

from vllm_backplane.errors import CheckpointError
from vllm_backplane.gguf import agreement, configuration, file, folder, header, tokenizer
from vllm_backplane.gguf.file import GgufFile
from vllm_backplane.gguf.header import Limits

RUNS = 6000
DESCRIBED = 300
SMALL = Limits(objects=24, nesting=2)
"""Within the reach of a fuzzer; the code is the same."""


def test_any_bytes_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    outcomes = {"read": 0, "refused": 0}

    def target(data: bytes) -> None:
        path.write_bytes(data)
        try:
            model = GgufFile(path, SMALL)
        except CheckpointError:
            outcomes["refused"] += 1
            return
        outcomes["read"] += 1
        for one in model.tensors.values():
            assert len(model.bytes_of(one)) == one.size
            assert one.row_bytes * prod(one.shape[:-1]) == one.size

    # A few hostile ones: from them the fuzzer finds the others.
    seeds = [File().build(), File(keys=[key("a", ARRAY, array(STRING, 16, text("b") * 16))]).build()]
    seeds.append(File(keys=[key("a", ARRAY, array(ARRAY, 2, array(ARRAY, 0, b"") * 2))]).build())
    seeds += [content for content, _said in list(HOSTILE.values())[::8] if len(content) < 4096]
    reached = fuzz(target, seeds, RUNS, "vllm_backplane/gguf")
    assert outcomes["read"] > 100 and outcomes["refused"] > 1000
    # Not all: a big-endian version, say, takes four certain bytes.
    insist_on_reach(reached, ("raise cursor.fault(", "raise self.fault("), header, file, missed=0.2)


def insist_on_reach(reached: Coverage, refusal: tuple[str, ...], *modules: Any, missed: float) -> None:
    """Of the lines of `modules` that refuse, no more than that share was not run."""
    lines = {(name, line) for name, _before, line in reached.seen}
    refusals = [
        (inspect.getsourcefile(module), number)
        for module in modules
        for number, line in enumerate(inspect.getsource(module).splitlines(), 1)
        if any(one in line for one in refusal)
    ]
    never = [place for place in refusals if place not in lines]
    assert len(refusals) > 20 and len(never) <= len(refusals) * missed, f"the fuzzer did not reach {never}"


def value(given: Any) -> tuple[int, bytes]:
    """Kind and bytes, as metadata have them."""
    match given:
        case bool():
            return BOOL, bytes([given])
        case int():
            return (U32, u32(given)) if given < 1 << 32 else (U64, u64(given))
        case float():
            return F32_VALUE, f32(given)
        case str():
            return STRING, text(given)
    kinds = {value(one)[0] for one in given}
    return ARRAY, array(min(kinds, default=U32), len(given), b"".join(value(one)[1] for one in given))


METADATA: dict[str, Any] = {
    "context_length": 16,
    "embedding_length": 4,
    "block_count": 1,
    "feed_forward_length": 8,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.key_length": 2,
    "rope.dimension_count": 2,
    "rope.freq_base": 1e4,
    "rope.scaling.factor": 1.0,
    "rope.scaling.type": "none",
    "attention.sliding_window": 4,
}
TOKENIZER: dict[str, Any] = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": ["a", "b", "ab", "<s>"],
    "token_type": [1, 1, 1, 3],
    "scores": [0.0, 0.0, 0.0, 0.0],
    "merges": ["a b"],
    "bos_token_id": 3,
    "eos_token_id": 3,
    "add_bos_token": True,
}
SHAPES: dict[str, list[int]] = {
    "token_embd": [4, 4],
    "output_norm": [4],
    "output": [4, 4],
    "blk.0.attn_norm": [4],
    "blk.0.ffn_norm": [4],
    "blk.0.attn_q": [4, 4],
    "blk.0.attn_k": [4, 2],
    "blk.0.attn_v": [4, 2],
    "blk.0.attn_output": [4, 4],
    "blk.0.ffn_gate": [4, 8],
    "blk.0.ffn_up": [4, 8],
    "blk.0.ffn_down": [8, 4],
}
VALUES: list[Any] = [
    *(0, 1, 3, 5, 1 << 23, (1 << 31) - 1, 1 << 63),
    *(-1.0, 0.5, 1e30, float("nan"), True),
    *("", "linear", "yarn", "llama", "no_vocab", "qwen2", "smollm"),
    *(["a", "a", "ab", "<s>"], ["b a"], ["a"] * 9, [1, 2], [1.0, 2.0, 3.0, 4.0]),
]
PLACES = [*METADATA, *TOKENIZER, *SHAPES, "architecture", "more"]


def made(orders: bytes) -> bytes:
    """A sound model of one layer and four tokens, with a change for each two bytes: what, and into what."""
    metadata, tokens, shapes = dict(METADATA), dict(TOKENIZER), dict(SHAPES)
    architecture: Any = "llama"
    for what, into in zip(orders[::2], orders[1::2], strict=False):
        place, chosen = PLACES[what % len(PLACES)], VALUES[into % len(VALUES)]
        if place in tokens:
            tokens[place] = chosen
        elif place in metadata:
            metadata[place] = chosen
        elif place == "architecture":
            architecture = chosen
        elif place == "more":
            shapes |= {f"blk.{into}.attn_norm": [4]}
        elif into % 2 == 0:
            shapes.pop(place, None)
        else:
            shapes[place] = [into, *SHAPES[place][1:]]
    keys = [key("general.architecture", *value(architecture))]
    keys += [key(f"{architecture}.{name}", *value(one)) for name, one in metadata.items()]
    keys += [key(f"tokenizer.ggml.{name}", *value(one)) for name, one in tokens.items()]
    tensors, offset = [], 0
    for name, shape in shapes.items():
        tensors.append(tensor(f"{name}.weight", shape, F32, offset))
        offset += -(-4 * prod(shape) // 32) * 32
    return File(keys=keys, tensors=tensors, data=bytes(offset)).build()


def test_any_model_is_described_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configuration, names, tokenizer: what is made of a file before vLLM is told of it. Bytes at random seldom pass
    the parser, so these are orders to change a sound model. No size that comes out is more than the file has."""
    monkeypatch.setenv("BACKPLANE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    outcomes = {"described": 0, "refused": 0}

    def target(orders: bytes) -> None:
        data = made(orders[:8])
        path.write_bytes(data)
        try:
            result = folder.described(path)
        except CheckpointError:
            outcomes["refused"] += 1
            return
        outcomes["described"] += 1
        config = json.loads((result / "config.json").read_text())
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "head_dim"):
            assert 0 < config[name] <= len(data), name
        shutil.rmtree(result)

    target(b"")
    assert outcomes == {"described": 1, "refused": 0}
    # Each change by itself: a check is met only where all before it are passed.
    seeds = [bytes((what, into)) for what in range(len(PLACES)) for into in range(len(VALUES))]
    reached = fuzz(target, seeds, DESCRIBED, "vllm_backplane/gguf")
    assert outcomes["described"] > 100 and outcomes["refused"] > 300, outcomes
    refusals = ("raise reader.fault(", "raise self.fault(", "raise _fault(", "raise CheckpointError(")
    insist_on_reach(reached, refusals, agreement, configuration, tokenizer, missed=0.4)
