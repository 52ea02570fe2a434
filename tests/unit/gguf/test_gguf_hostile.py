"""Damaged and hostile GGUF files raise a clear error, without a crash and without taking much memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES

from tests.gguf_bytes import ARRAY, BOOL, F32, Q4_0, STRING, U8, U32, U64, File, array, key, tensor, text, u32, u64
from vllm_backplane.errors import CheckpointError
from vllm_backplane.gguf import file as gguf_file
from vllm_backplane.gguf.cursor import Limits
from vllm_backplane.gguf.file import GgufFile, require_unchanged_files
from vllm_backplane.gguf.model_files import is_model, open_model

HUGE = 1 << 60


def write(folder: Path, content: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path, File(data=bytes(range(80))).build()))
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["some.numbers"].tolist() == [1, 2, 3]
    assert file.metadata["some.words"].tolist() == ["a", "é"]
    assert file.metadata["some.truth"] is True
    assert file.metadata["nested"][0].tolist() == [7] and file.metadata["nested"][1].tolist() == ["x"]
    quantized, norm = file.tensors["blk.0.w"], file.tensors["norm"]
    assert quantized.shape == (2, 32) and quantized.size == 36 and quantized.row_bytes == 18
    assert bytes(file.bytes_of(quantized)) == bytes(range(36))
    assert np.frombuffer(file.bytes_of(norm), np.uint8).tolist() == list(range(64, 80))


def _file(**changes: object) -> bytes:
    return File(**changes).build()  # type: ignore[arg-type]


def _deep(levels: int) -> bytes:
    inner = array(U8, 0, b"")
    for _ in range(levels - 1):
        inner = array(ARRAY, 1, inner)
    return inner


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too few"),
    "magic alone": (b"GGUF", "too few"),
    "wrong magic": (_file(magic=b"GGML"), "begins with"),
    "version 1": (_file(version=1), "version 1"),
    "version of tomorrow": (_file(version=4), "version 4"),
    "big-endian": (_file(version=3 << 24), "big-endian"),
    "no counts": (_file()[:12], "bytes are left|are left"),
    "tensor count": (_file(tensor_count=HUGE), "declares .* tensors"),
    "key count": (_file(key_count=HUGE), "declares .* metadata keys"),
    "one key more than there are": (_file(key_count=6, tensors=[], data=b""), "a metadata key|can hold|valid"),
    "key length": (_file(keys=[u64(HUGE)]), "declares|left"),
    "key of megabytes": (_file(keys=[key("k" * 70000, U8, b"\x00")]), "more than 65535"),
    "empty key": (_file(keys=[key("", U8, b"\x00")]), "empty"),
    "key twice": (_file(keys=[key("a", U8, b"\x00"), key("a", U8, b"\x01")]), "twice"),
    "long key twice": (_file(keys=[key("k" * 65535, U8, b"\x00")] * 2), "'kkk.*twice"),
    "key that is not UTF-8": (_file(keys=[key(b"\xff\xfe", U8, b"\x00")]), "UTF-8"),
    "text length": (_file(keys=[key("a", STRING, u64(HUGE))]), "declares"),
    "text past the end": (_file(keys=[key("a", STRING, u64(5000))]), "are left"),
    "text that is not UTF-8": (_file(keys=[key("a", STRING, text(b"\xff"))]), "UTF-8"),
    "word that is not UTF-8": (_file(keys=[key("a", ARRAY, array(STRING, 2, text("b") + text(b"\xff")))]), "UTF-8"),
    "word past the end": (_file(keys=[key("a", ARRAY, array(STRING, 1, u64(9999)))]), "are left"),
    "unknown kind": (_file(keys=[key("a", 13, b"\x00" * 8)]), "unknown type 13"),
    "array of an unknown kind": (_file(keys=[key("a", ARRAY, array(99, 1, b"\x00" * 8))]), "unknown type 99"),
    "array of too many numbers": (_file(keys=[key("a", ARRAY, array(U32, HUGE, b""))]), "declares"),
    "array of too many words": (_file(keys=[key("a", ARRAY, array(STRING, HUGE, b""))]), "declares"),
    "array of too many arrays": (_file(keys=[key("a", ARRAY, array(ARRAY, HUGE, b""))]), "declares"),
    "size that overflows": (_file(keys=[key("a", ARRAY, array(U64, 1 << 61, b""))]), "declares"),
    "many arrays in arrays": (
        _file(keys=[key("a", ARRAY, array(ARRAY, 5000, array(U8, 0, b"") * 5000))]),
        "more than 4096 arrays in arrays",
    ),
    "arrays in arrays": (_file(keys=[key("a", ARRAY, _deep(5000))]), "deep"),
    "truth of 2": (_file(keys=[key("a", BOOL, b"\x02")]), "boolean"),
    "alignment 0": (_file(keys=[key("general.alignment", U32, u32(0))]), "alignment"),
    "alignment 24": (_file(keys=[key("general.alignment", U32, u32(24))]), "alignment"),
    "alignment of gigabytes": (_file(keys=[key("general.alignment", U32, u32(1 << 31))]), "alignment"),
    "alignment in words": (_file(keys=[key("general.alignment", STRING, text("32"))]), "alignment"),
    "alignment in a list": (_file(keys=[key("general.alignment", ARRAY, array(U32, 1, u32(32)))]), "alignment"),
    "alignment in long words": (
        _file(keys=[key("general.alignment", ARRAY, array(STRING, 99, text("w" * 65536) * 99))]),
        "alignment is .*www",
    ),
    "no dimensions": (_file(tensors=[tensor("t", [], F32, 0)]), "dimensions"),
    "many dimensions": (_file(tensors=[tensor("t", [1], F32, 0, count=1 << 31)]), "dimensions"),
    "empty tensor": (_file(tensors=[tensor("t", [0, 4], F32, 0)]), "empty"),
    "absurd size": (_file(tensors=[tensor("t", [1 << 62, 1 << 62, 1 << 62], F32, 0)]), "ends at byte"),
    "size that wraps to 0": (_file(tensors=[tensor("t", [1 << 32, 1 << 32], F32, 0)]), "ends at byte"),
    "offset past the end": (_file(tensors=[tensor("t", [4], F32, 1 << 40)]), "ends at byte"),
    "offset that wraps": (_file(tensors=[tensor("t", [4], F32, (1 << 64) - 32)]), "ends at byte"),
    "misaligned": (_file(tensors=[tensor("t", [4], F32, 4)]), "misaligned"),
    "overlap": (_file(tensors=[tensor("a", [12], F32, 0), tensor("b", [4], F32, 32)]), "overlap"),
    "same place": (_file(tensors=[tensor("a", [4], F32, 0), tensor("b", [4], F32, 0)]), "overlap"),
    "gap": (_file(tensors=[tensor("a", [4], F32, 0), tensor("b", [4], F32, 64)]), "'a' and .* 'b' have a gap of 48"),
    "gap before the first": (_file(tensors=[tensor("a", [4], F32, 64)]), "the header and .* 'a' have a gap"),
    "bytes after the last": (_file(tensors=[tensor("a", [4], F32, 0)]), "ends at byte .*, and the tensor 'a' at"),
    "tensor twice": (_file(tensors=[tensor("a", [4], F32, 0), tensor("a", [4], F32, 32)]), "twice"),
    "unknown type": (_file(tensors=[tensor("t", [32], 4, 0)]), "unknown type 4"),
    "type of tomorrow": (_file(tensors=[tensor("t", [32], 4096, 0)]), "unknown type 4096"),
    "part of a block": (_file(tensors=[tensor("t", [31], Q4_0, 0)]), "not a multiple"),
    "long name": (_file(tensors=[tensor("n" * 600, [4], F32, 0)]), "more than 512"),
    "name that is not UTF-8": (_file(tensors=[tensor(b"\xc3\x28", [4], F32, 0)]), "UTF-8"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(case: str, tmp_path: Path) -> None:
    content, message = HOSTILE[case]
    path = write(tmp_path, content)
    with pytest.raises(CheckpointError, match=message) as fault:
        GgufFile(path)
    assert str(path) in str(fault.value) and len(str(fault.value)) < 1000


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = File().build()
    for size in range(len(whole)):
        with pytest.raises(CheckpointError):
            GgufFile(write(tmp_path, whole[:size]))
    assert GgufFile(write(tmp_path, whole)).tensors


def test_another_type_of_a_tensor_is_refused(tmp_path: Path) -> None:
    """Changes the type of each tensor. Only a type whose values take the same number of bytes cannot be noticed."""
    for name, width in (("blk.0.w", 32), ("norm", 4)):
        for kind, (per_block, block_bytes) in GGML_QUANT_SIZES.items():
            sound = {"blk.0.w": (Q4_0, 36), "norm": (F32, 16)}
            changed = {**{one: number for one, (number, _) in sound.items()}, name: int(kind)}
            rows = 2 if name == "blk.0.w" else 1
            size = rows * width // per_block * block_bytes
            same = -(-size // 32) == 2 if name == "blk.0.w" else size == sound[name][1]  # with the padding
            if width % per_block == 0 and same:
                continue
            tensors = [tensor("blk.0.w", [32, 2], changed["blk.0.w"], 0), tensor("norm", [4], changed["norm"], 64)]
            with pytest.raises(CheckpointError):
                GgufFile(write(tmp_path, _file(tensors=tensors)))


def test_refusals_take_little_memory(tmp_path: Path) -> None:
    """The declared counts would fit into a large file, here a sparse file of 64 MiB."""
    paths = []
    for name, content in (
        ("words", _file(keys=[key("a", ARRAY, array(STRING, 1 << 23, b""))], tensors=[])),
        ("arrays", _file(keys=[key("a", ARRAY, array(ARRAY, 1 << 22 | 1, b""))], tensors=[])),
        ("text", _file(keys=[key("a", STRING, u64((1 << 24) + 1))], tensors=[])),
        ("tensors", _file(tensor_count=1 << 20, tensors=[])),
    ):
        paths.append(write(tmp_path, content, name))
        os.truncate(paths[-1], 1 << 26)
    GgufFile(write(tmp_path, File().build()))  # imports what the first use imports
    tracemalloc.start()
    try:
        for path in paths:
            with pytest.raises(CheckpointError):
                GgufFile(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_limits_are_for_the_whole_file(tmp_path: Path) -> None:
    words = array(STRING, 6, text("") * 6)
    path = write(tmp_path, _file(keys=[key(name, ARRAY, words) for name in "ab"]))
    assert len(GgufFile(path, Limits(strings=12)).metadata) == 2
    with pytest.raises(CheckpointError, match="more than 11 strings"):
        GgufFile(path, Limits(strings=11))


@pytest.mark.parametrize("use", [open_model, is_model])
@pytest.mark.parametrize(
    ("name", "message"), [("n" * 300, "File name too long"), ("m\udcff.gguf", "is not UTF-8; rename the file")]
)
def test_a_path_that_cannot_be_used_is_refused(tmp_path: Path, use: Any, name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as fault:
        use(tmp_path / name)
    assert len(str(fault.value)) < 1000 and "\n" not in str(fault.value)


@pytest.mark.parametrize("shorter", [True, False])
def test_a_file_that_changes_while_it_is_mapped(tmp_path: Path, shorter: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "_mappings", weakref.WeakSet())  # without the files of other tests
    path = write(tmp_path, File().build())
    file = GgufFile(path)
    rows = np.frombuffer(file.bytes_of(file.tensors["norm"]), np.uint8)
    descriptors = len(os.listdir("/proc/self/fd"))
    del file
    require_unchanged_files()
    other = write(tmp_path, File().build(), "other")
    other.rename(path)  # the mapping keeps the first file
    require_unchanged_files()
    opened = GgufFile(path)
    if shorter:
        os.truncate(path, 64)
    else:
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))
    with pytest.raises(CheckpointError, match=f"{path} was changed while it is served.*rename the new file") as fault:
        require_unchanged_files()
    assert ("bytes, and has 64)" in str(fault.value)) is shorter
    del opened, fault  # the traceback of the error refers to the mapping
    require_unchanged_files()
    del rows
    assert len(os.listdir("/proc/self/fd")) < descriptors


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for name, message in (("absent.gguf", "No such file"), ("pipe.gguf", "regular"), (".", "no GGUF file")):
        with pytest.raises(CheckpointError, match=message):
            open_model(tmp_path / name)


def _part(number: int, count: int, total: int, name: str, *, declared: int | None = None) -> bytes:
    keys = [
        key("split.no", 2, (number if declared is None else declared).to_bytes(2, "little")),
        key("split.count", 2, count.to_bytes(2, "little")),
        key("split.tensors.count", 5, total.to_bytes(4, "little")),
    ]
    return _file(keys=keys, tensors=[tensor(name, [4], F32, 0)], data=bytes([number]) * 16)


def _split(folder: Path, names: tuple[str, ...] = ("a", "b", "c"), total: int = 3, **changes: int) -> Path:
    for number, name in enumerate(names):
        content = _part(number, len(names), total, name, **changes if number == 1 else {})
        write(folder, content, f"m-{number + 1:05}-of-{len(names):05}.gguf")
    return folder / "m-00002-of-00003.gguf"


def test_parts_are_found_from_any_of_them_and_from_their_folder(tmp_path: Path) -> None:
    second = _split(tmp_path)
    for given in (second, tmp_path):
        model = open_model(given)
        assert list(model.tensors) == ["a", "b", "c"]
        location = model.tensors["c"]
        assert bytes(location.file.bytes_of(location.tensor)) == b"\x02" * 16


def test_missing_and_foreign_parts_are_refused(tmp_path: Path) -> None:
    second = _split(tmp_path)
    third = tmp_path / "m-00003-of-00003.gguf"
    kept = third.read_bytes()
    third.unlink()
    with pytest.raises(CheckpointError, match=r"m-00003-of-00003\.gguf"):
        open_model(second)
    third.write_bytes(kept)
    _split(tmp_path, declared=2)
    with pytest.raises(CheckpointError, match="named part 2"):
        open_model(second)
    _split(tmp_path, names=("a", "a", "c"))
    with pytest.raises(CheckpointError, match="do not belong together"):
        open_model(second)
    _split(tmp_path, total=4)
    with pytest.raises(CheckpointError, match="declares 4"):
        open_model(second)
    second.rename(tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        open_model(tmp_path / "alone.gguf")


def test_numbers_of_parts_that_are_arrays_are_refused(tmp_path: Path) -> None:
    """Found by the fuzzer: comparing an array with a number gives an array."""
    second = _split(tmp_path)
    for name in ("split.no", "split.count", "split.tensors.count"):
        first = tmp_path / "m-00001-of-00003.gguf"
        kept, pair = first.read_bytes(), array(U32, 2, u32(0) + u32(3))
        whole = {"split.no": (2, bytes(2)), "split.count": (2, b"\x03\x00"), "split.tensors.count": (5, u32(3))}
        keys = [key(other, *(whole[other] if other != name else (ARRAY, pair))) for other in whole]
        first.write_bytes(_file(keys=keys, tensors=[tensor("a", [4], F32, 0)], data=bytes(16)))
        with pytest.raises(CheckpointError, match=r"named part 1|declares None"):
            open_model(second)
        first.write_bytes(kept)


def test_a_folder_of_several_models_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("one.gguf", "two.gguf"):
        write(tmp_path, File().build(), name)
    with pytest.raises(CheckpointError, match=r"one\.gguf, two\.gguf"):
        open_model(tmp_path)
    (tmp_path / "two.gguf").rename(tmp_path / "mmproj-two.gguf")
    assert open_model(tmp_path).path.name == "one.gguf"


@pytest.mark.process
def test_the_reader_needs_neither_torch_nor_vllm() -> None:
    program = "import sys, vllm_backplane.gguf.model_files\nprint({'torch', 'vllm'} & sys.modules.keys() or 'neither')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "neither"
