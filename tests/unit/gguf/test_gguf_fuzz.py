"""Fuzzes the GGUF parser and everything made from its result: any input gives a model or a `CheckpointError`."""

from __future__ import annotations

import inspect
import json
import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_bytes import ARRAY, STRING, File, array, key, text
from guided import Coverage, fuzz
from sound_models import MODELS, mutated_model, single_changes
from test_gguf_hostile import HOSTILE

from vllm_backplane.errors import CheckpointError
from vllm_backplane.gguf import (
    architectures,
    config_folder,
    consistency,
    cursor,
    file,
    hf_config,
    lazy_tensor,
    tokenizer,
)
from vllm_backplane.gguf.cursor import Limits
from vllm_backplane.gguf.file import GgufFile
from vllm_backplane.gguf.model_files import open_model

pytestmark = pytest.mark.slow

RUNS = 6000
MODEL_RUNS = 200
SMALL = Limits(strings=24, inner_arrays=8, nesting=2)
"""Limits small enough for a fuzzer to exceed."""


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

    # A few hostile files are enough: the fuzzer derives the others from them.
    seeds = [File().build(), File(keys=[key("a", ARRAY, array(STRING, 16, text("b") * 16))]).build()]
    seeds.append(File(keys=[key("a", ARRAY, array(ARRAY, 2, array(ARRAY, 0, b"") * 2))]).build())
    seeds += [content for content, _message in list(HOSTILE.values())[::8] if len(content) < 4096]
    reached = fuzz(target, seeds, RUNS, "vllm_backplane/gguf")
    assert outcomes["read"] > 50 and outcomes["refused"] > 1000
    # Some checks are out of reach: a big-endian version, for example, takes four exact bytes.
    require_coverage(reached, ("raise cursor.fault(", "raise self.fault("), cursor, file, missed=0.2)


def require_coverage(reached: Coverage, refusal: tuple[str, ...], *modules: Any, missed: float) -> None:
    """Asserts that at most the share `missed` of the raising lines of `modules` was never executed."""
    lines = {(name, line) for name, _before, line in reached.seen}
    refusals = [
        (inspect.getsourcefile(module), number)
        for module in modules
        for number, line in enumerate(inspect.getsource(module).splitlines(), 1)
        if any(one in line for one in refusal)
    ]
    never = [place for place in refusals if place not in lines]
    assert len(refusals) > 20 and len(never) <= len(refusals) * missed, f"the fuzzer did not reach {never}"


def test_any_model_is_described_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuzzes the configuration, the names, the tokenizer and the tensors as a worker loads them.

    Random bytes seldom pass the parser, so the fuzzer mutates valid models. No size in a configuration exceeds that of
    the file.
    """
    monkeypatch.setenv("BACKPLANE_CACHE", str(tmp_path / "cache"))
    outcomes = {"accepted": 0, "refused": 0}

    def target(orders: bytes) -> None:
        contents = mutated_model(orders[:9])
        count = len(contents)
        paths = [
            tmp_path / (f"m-{one:05}-of-{count:05}.gguf" if count > 1 else "m.gguf") for one in range(1, count + 1)
        ]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        try:
            result = config_folder.config_folder(paths[0])
        except CheckpointError:
            outcomes["refused"] += 1
            return
        outcomes["accepted"] += 1
        config = json.loads((result / "config.json").read_text())
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "head_dim"):
            assert 0 < config[name] <= sum(map(len, contents)), name
        shutil.rmtree(result)
        for one in architectures.checkpoint_tensors(open_model(paths[0])):
            for name, loaded in lazy_tensor.weights(one):
                assert "{" not in name
                torch.zeros(loaded.shape).copy_(loaded)

    for number in range(len(MODELS)):
        target(bytes([number]))
    assert outcomes == {"accepted": len(MODELS), "refused": 0}
    reached = fuzz(target, single_changes(), MODEL_RUNS, "vllm_backplane/gguf")
    assert outcomes["accepted"] > 100 and outcomes["refused"] > 300, outcomes
    refusals = ("raise reader.fault(", "raise self.fault(", "raise _fault(", "raise CheckpointError(")
    require_coverage(reached, refusals, consistency, architectures, hf_config, tokenizer, missed=0.35)
