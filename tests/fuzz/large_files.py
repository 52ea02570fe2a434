"""Builds GGUF files of 8 to 32 MiB that have very many of one thing, and measures what reading one takes.

The inputs of campaigns are small, so that a constant dominates their rule for memory. Here only the multiple counts.

python -m tests.fuzz.large_files PATH
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.fuzz.campaign import reset_peak, status_bytes
from tests.gguf_bytes import ARRAY, F32, F32_VALUE, STRING, U8, U32, File, array, f32, key, tensor, text, u32
from tests.valid_gguf_models import MODELS, built

MIB = 1 << 20
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WIDE = "".join(map(chr, range(0x100, 0x700)))
"""Letters of two bytes. Python takes 80 bytes for one of them."""


def words(count: int, size: int, letters: str = LETTERS) -> Iterator[str]:
    return itertools.islice(("".join(word) for word in itertools.product(letters, repeat=size)), count)


def strings(these: Iterable[str]) -> tuple[int, bytes]:
    """Returns the type number and the bytes of an array of strings."""
    encoded = [text(word) for word in these]
    return ARRAY, array(STRING, len(encoded), b"".join(encoded))


def with_keys(keys: list[bytes]) -> bytes:
    """Returns a valid file with further metadata."""
    return built(MODELS["llama"], {}, keys)


def many_tokens(kind: str, count: int) -> bytes:
    """Returns a valid file with so many tokens, each of which has a row in the embedding."""
    model = replace(MODELS["llama"], top={"token_embd.weight": [32, count], "output_norm.weight": [32]})
    metadata: Mapping[str, Any] = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": strings(words(count, 4)),
        "tokenizer.ggml.token_type": (ARRAY, array(U32, count, u32(1) * count)),
        "tokenizer.ggml.scores": (ARRAY, array(F32_VALUE, count, f32(0) * count)),
        "tokenizer.ggml.merges": strings(()),
    }
    return built(model, dict(metadata))


def many_tensors(count: int, name: int) -> bytes:
    """Returns a file with so many tensors, whose names have `name` letters."""
    tensors = [tensor(one.rjust(name, "t"), [8], F32, 32 * number) for number, one in enumerate(words(count, 4))]
    keys = [key("general.architecture", STRING, text("llama"))]
    return File(keys=keys, tensors=tensors, data=bytes(32 * count)).build()


FILES: dict[str, Callable[[], bytes]] = {
    "inner arrays": lambda: with_keys([key("a", ARRAY, array(ARRAY, 2 * MIB, array(U8, 0, b"") * 2 * MIB))]),
    "merges": lambda: built(MODELS["llama"], {"tokenizer.ggml.merges": strings(itertools.repeat("a b", MIB))}),
    "strings": lambda: with_keys([key("a", *strings(words(2 * MIB, 2, WIDE)))]),
    "keys": lambda: with_keys([key(word.rjust(200, "k"), ARRAY, array(U8, 0, b"")) for word in words(65000, 4)]),
    "texts": lambda: with_keys([key(name, STRING, text("x" * 15 * MIB + "\U0001f600")) for name in "ab"]),
    "tokens": lambda: many_tokens("gpt2", 200_000),
    "scored tokens": lambda: many_tokens("llama", 200_000),
    "more tokens": lambda: many_tokens("gpt2", (1 << 18) - 1),
    "tensors": lambda: many_tensors(1 << 16, 100),
    "more tensors": lambda: many_tensors(200_000, 4),
}
"""Functions that build the files, by what a file has many of."""


def measured(path: Path) -> tuple[str, float, int]:
    """Returns why the file at `path` was refused ("" if it was not), the seconds of the processor, and the bytes of
    memory that it took to make the folder for it."""
    from vllm_backplane.errors import CheckpointError
    from vllm_backplane.gguf.config_folder import config_folder

    with tempfile.TemporaryDirectory(prefix="backplane-large-") as folder:
        os.environ["BACKPLANE_CACHE"] = folder
        small = Path(folder, "small.gguf")
        small.write_bytes(with_keys([]))
        config_folder(small)  # imports what the first use imports
        ctypes.CDLL(None).malloc_trim(0)
        reset_peak()
        before, began = status_bytes("VmRSS"), time.process_time()
        refusal = ""
        try:
            config_folder(path)
        except CheckpointError as fault:
            refusal = str(fault)
        return refusal, time.process_time() - began, status_bytes("VmHWM") - before


if __name__ == "__main__":
    json.dump(measured(Path(sys.argv[1])), sys.stdout)
