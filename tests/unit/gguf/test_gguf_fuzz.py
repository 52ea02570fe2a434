"""The parser under a bounded, coverage-guided fuzzer: any bytes give a model or a CheckpointError, and nothing else."""

from __future__ import annotations

import inspect
from math import prod
from pathlib import Path

from gguf_bytes import ARRAY, STRING, File, array, key, text
from guided import fuzz
from test_gguf_hostile import HOSTILE

from vllm_backplane.errors import CheckpointError
from vllm_backplane.gguf import file, header
from vllm_backplane.gguf.file import GgufFile
from vllm_backplane.gguf.header import Limits

RUNS = 6000
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
        for tensor in model.tensors.values():
            assert len(model.bytes_of(tensor)) == tensor.size
            assert tensor.row_bytes * prod(tensor.shape[:-1]) == tensor.size

    # A few hostile ones: from them the fuzzer finds the others.
    seeds = [File().build(), File(keys=[key("a", ARRAY, array(STRING, 16, text("b") * 16))]).build()]
    seeds.append(File(keys=[key("a", ARRAY, array(ARRAY, 2, array(ARRAY, 0, b"") * 2))]).build())
    seeds += [content for content, _said in list(HOSTILE.values())[::8] if len(content) < 4096]
    reached = fuzz(target, seeds, RUNS, "vllm_backplane/gguf")
    assert outcomes["read"] > 100 and outcomes["refused"] > 1000
    lines = {(name, line) for name, _before, line in reached.seen}
    refusals = [
        (inspect.getsourcefile(module), number)
        for module in (header, file)
        for number, line in enumerate(inspect.getsource(module).splitlines(), 1)
        if "raise cursor.fault(" in line or "raise self.fault(" in line
    ]
    missed = [place for place in refusals if place not in lines]
    # Not all: a big-endian version, say, takes four certain bytes.
    assert len(refusals) > 20 and len(missed) <= len(refusals) // 5, f"the fuzzer did not reach {missed}"
