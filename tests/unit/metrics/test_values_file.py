"""Tests the files of values: what is written is read, and no other content is taken for values."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from vllm_backplane.errors import BackplaneError
from vllm_backplane.metrics import series, values_file
from vllm_backplane.metrics.values_file import LARGEST, MAGIC, ValuesFile, read

LISTED = [
    (series.STEPS, ("0", "replayed", "")),
    (series.STEPS, ("0", "eager", "not captured")),
    (series.OPERATOR_SECONDS, ("0", "paged_attention")),
]


@pytest.fixture
def file(tmp_path: Path) -> ValuesFile:
    written = ValuesFile(tmp_path / "worker-0", LISTED)
    written.values[1] = 2.0**52 + 1
    written.values[2] = 0.125
    written.save()
    return written


def test_what_is_written_is_read(file: ValuesFile) -> None:
    assert read(file.path) == list(zip(LISTED, (0.0, 2.0**52 + 1, 0.125), strict=True))
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.path.parent.iterdir()] == ["worker-0"]


def test_values_are_visible_when_they_are_saved(file: ValuesFile) -> None:
    file.values[0] = 7
    assert read(file.path)[0][1] == 0
    file.save()
    assert read(file.path)[0][1] == 7


def test_a_later_process_replaces_the_file_and_removes_its_own(file: ValuesFile) -> None:
    later = ValuesFile(file.path, LISTED[:1])
    assert read(file.path) == [(LISTED[0], 0.0)]
    later.remove()
    assert not file.path.exists()
    later.save()
    assert not file.path.exists()


@pytest.mark.parametrize("length", [0, 8, 15, 16, 40, -8, -1])
def test_a_truncated_file_is_refused(file: ValuesFile, length: int) -> None:
    os.truncate(file.path, length if length >= 0 else file.path.stat().st_size + length)
    with pytest.raises(BackplaneError, match=r"has no metrics of this release .* start the server again"):
        read(file.path)
    file.save()  # a writer whose file was truncated goes on


def encoded(names: object, values: tuple[float, ...] = (), count: int | None = None, magic: bytes = MAGIC) -> bytes:
    text = names if isinstance(names, bytes) else json.dumps(names).encode()
    return (
        struct.pack("=8sII", magic, len(values) if count is None else count, len(text))
        + text
        + struct.pack(f"={len(values)}d", *values)
    )


@pytest.mark.parametrize(
    "content",
    [
        b"x" * 100,
        b"\0" * (LARGEST + 1),
        encoded([], magic=b"BPVALUE0"),
        encoded([[series.GRAPHS, ["0"]]], (1.0, 2.0)),
        encoded({"0": 0}, (1.0,)),
        encoded([[series.GRAPHS, ["0", "1"]]], (1.0,)),
        encoded([[series.GRAPHS, [0]]], (1.0,)),
        encoded([[series.GRAPHS, "0"]], (1.0,)),
        encoded([["vllm:num_requests_running", ["0"]]], (1.0,)),
        encoded([[["x"], ["0"]]], (1.0,)),
        encoded(["x" * 10_000], (1.0,)),
        encoded(b"\xff\xfe", (1.0,)),
        encoded(b"{", (1.0,)),
        encoded([], (), count=2**32 - 1),
    ],
    ids=range(14),
)
def test_other_content_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "worker-0"
    path.write_bytes(content)
    with pytest.raises(BackplaneError, match="has no metrics of this release") as raised:
        read(path)
    assert len(str(raised.value)) < 500


def test_a_link_is_not_followed(file: ValuesFile) -> None:
    link = file.path.with_name("worker-1")
    link.symlink_to(file.path)
    with pytest.raises(OSError, match="symbolic links"):
        read(link)


def test_a_full_disk_is_logged_once_and_ends_nothing(file: ValuesFile, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[str] = []

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(values_file.logger, "error", lambda text, *values: errors.append(text % values))
    monkeypatch.setattr(os, "pwrite", full)
    file.save()
    file.save()
    [error] = errors
    assert "No space left on device" in error
