"""Tests models that are added from a path: what is verified, copied, linked, refused and removed."""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from tests.valid_gguf_models import MODELS, mutated_model
from vllm_backplane.added_models import adding, checkpoint, entries, files, lookup, names, serving
from vllm_backplane.added_models.checkpoint import SERVED_TYPES, examine
from vllm_backplane.added_models.entries import Entry
from vllm_backplane.added_models.progress import QUIET, Progress, size_text
from vllm_backplane.cli import main
from vllm_backplane.errors import BackplaneError, CheckpointError, UsageError
from vllm_backplane.models import DEFAULT, FULL_PRECISION, obtain

(WHOLE,) = mutated_model(b"\0")
PARTS = mutated_model(bytes([list(MODELS).index("in two parts")]))
CONFIG = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
A, B = {"a": np.ones((4, 4), np.float16)}, {"b": np.ones(2, np.float32)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BACKPLANE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Provides a GGUF file outside of the cache."""
    path = tmp_path / "elsewhere" / "tiny-Q8_0.gguf"
    path.parent.mkdir()
    path.write_bytes(WHOLE)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Provides a folder with a safetensors checkpoint in two parts, and files that serving does not need."""
    path = tmp_path / "elsewhere" / "tiny"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text("{}")
    (path / "model-00001-of-00002.safetensors").write_bytes(save(A))
    (path / "model-00002-of-00002.safetensors").write_bytes(save(B))
    write_index(path, a="model-00001-of-00002.safetensors", b="model-00002-of-00002.safetensors")
    (path / "pytorch_model.bin").write_bytes(b"pickled")
    (path / ".git").mkdir()
    (path / ".git" / "config").write_text("[core]")
    return path


def write_index(folder: Path, **weight_map: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def add(path: Path, name: str | None = None, *, link: bool = False, replace: bool = False) -> Entry:
    return adding.add_path(str(path), name, link=link, replace=replace, progress=QUIET)


def left() -> list[str]:
    root = entries.root()
    return sorted(one.name for one in root.iterdir() if not one.name.endswith(".lock")) if root.exists() else []


def test_a_file_is_copied_and_does_not_change_with_the_original(file: Path) -> None:
    entry = add(file)
    assert entry.name == "tiny-Q8_0" and str(entry.format) == "GGUF F32, llama"
    file.write_bytes(b"other")
    assert entry.path.read_bytes() == WHOLE and entry.fault(contents=True) is None
    assert lookup("tiny-Q8_0") == entry and serving.path_to_serve("tiny-Q8_0", print) == entry.path
    assert left() == ["tiny-Q8_0"]


def test_nobody_else_can_read_what_was_added(file: Path) -> None:
    before = os.umask(0)
    try:
        add(file)
    finally:
        os.umask(before)
    for path in (entries.root(), *entries.root().rglob("*")):
        if path.suffix != ".lock":
            assert path.stat().st_mode & 0o077 == 0, path


def test_only_what_serving_needs_is_copied_of_a_folder(folder: Path) -> None:
    entry = add(folder)
    copied = sorted(str(one.relative_to(entry.folder)) for one in entry.folder.rglob("*"))
    assert (
        copied
        == sorted(entry.files)
        == [
            *("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
            *("model.safetensors.index.json", "tokenizer.json"),
        ]
    )
    assert entry.path == entry.folder and str(entry.format) == "safetensors F16, Qwen2ForCausalLM"


def test_all_parts_of_a_split_file_belong_to_the_model(tmp_path: Path) -> None:
    for number, part in enumerate(PARTS, 1):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(part)
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"?")
    entry = add(tmp_path / "m-00002-of-00002.gguf")
    assert entry.name == "m" and sorted(entry.files) == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert add(tmp_path, "again").main == "m-00001-of-00002.gguf"


def test_a_link_takes_no_space_and_reports_every_change(file: Path) -> None:
    entry = add(file, link=True)
    assert entry.path == file and serving.path_to_serve("tiny-Q8_0", print) == file
    assert sum(one.stat().st_size for one in entries.root().rglob("*") if one.is_file()) < 2000
    os.utime(file, ns=(1, 1))
    assert entry.fault() == ("changed", "tiny-Q8_0.gguf was written to")
    entry.require_complete()  # the contents are the same
    file.write_bytes(WHOLE[:-1] + b"!")
    with pytest.raises(BackplaneError, match=r"tiny-Q8_0\.gguf has changed; run 'vllm-backplane model add .*--link"):
        serving.path_to_serve("tiny-Q8_0", print)
    file.write_bytes(WHOLE + b"!")
    assert entry.fault() == ("changed", f"tiny-Q8_0.gguf has {len(WHOLE) + 1} bytes instead of {len(WHOLE)}")
    file.unlink()
    assert entry.fault() == ("link broken", f"{file} does not exist")
    adding.remove("tiny-Q8_0", force=False, progress=QUIET)
    assert left() == []


def test_removing_a_link_keeps_the_files(folder: Path) -> None:
    add(folder, link=True)
    before = sorted(folder.rglob("*"))
    adding.remove("tiny", force=False, progress=QUIET)
    assert sorted(folder.rglob("*")) == before and names() == []


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "-x", "x" * 97, "a b", "a\n", "smollm2"])
def test_names_that_are_paths_or_taken_are_refused(file: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"--name"):
        entries.require_name(name)
    if name:
        with pytest.raises(UsageError):
            add(file, name)
    assert left() == []


def test_a_name_is_replaced_on_request_only(file: Path, folder: Path) -> None:
    add(file, "one")
    with pytest.raises(UsageError, match="--replace"):
        add(folder, "one")
    assert lookup("one") == entries.read("one") and entries.read("one").main
    assert add(folder, "one", replace=True).format.kind == "safetensors"
    assert entries.read("one").format.kind == "safetensors" and left() == ["one"]


def test_a_replacement_that_fails_leaves_the_former_model(file: Path, tmp_path: Path) -> None:
    entry = add(file, "one")
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(WHOLE[:-1000])
    with pytest.raises(CheckpointError):
        add(damaged, "one", replace=True)
    assert lookup("one") == entry and entry.fault(contents=True) is None


class Killed(BaseException):
    """Stands for the end of the process."""


def kill_at_the_exchange(name: str, patch: pytest.MonkeyPatch) -> None:
    """Lets every change of the file system fail from the moment at which a complete addition would get its name."""
    is_dead = False

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *target: Any) -> Any:
            nonlocal is_dead
            is_dead = is_dead or (Path(path) == entries.staging(name) and bool(target))
            if is_dead:
                raise Killed
            return function(path, *target)

        return call

    patch.setattr(Path, "rename", dying(Path.rename))
    patch.setattr("shutil.rmtree", dying(shutil.rmtree))


def test_a_replacement_that_is_killed_leaves_the_former_model(
    file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = add(file, "one")
    with monkeypatch.context() as patch:
        kill_at_the_exchange("one", patch)
        with pytest.raises(Killed):
            add(folder, "one", replace=True)
    assert names() == [] and entries.unfinished() == ["one"]
    with pytest.raises(UsageError, match="--replace"):
        add(folder, "one")
    assert lookup("one") == entry and entry.fault(contents=True) is None
    assert add(folder, "one", replace=True).format.kind == "safetensors" and left() == ["one"]


def test_a_replacement_that_cannot_be_exchanged_leaves_the_former_model(
    file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = add(file, "one")
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if path == entries.staging("one"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fails)
        with pytest.raises(BackplaneError, match="cannot write one"):
            add(folder, "one", replace=True)
    assert lookup("one") == entry and left() == ["one"]


def test_what_an_interrupted_removal_left_is_listed_and_removed(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_arguments: Any) -> None:
        raise Killed

    add(file, "one")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path: killed() if Path(path).exists() else None)
        with pytest.raises(Killed):
            adding.remove("one", force=False, progress=QUIET)
    assert names() == [] and left() != []
    assert main(["model", "list"]) == 0
    assert "unfinished" in capsys.readouterr().out.splitlines()[-1]
    assert adding.remove("one", force=False, progress=QUIET) == "one" and left() == []


@pytest.mark.parametrize("link", [False, True], ids=["copy", "link"])
@pytest.mark.parametrize("name", ["a\xa0b.gguf", "a\\b.gguf", "x" * 200 + ".gguf", "a\tb/m.gguf", "a\nb/m.gguf"])
def test_what_no_manifest_can_name_is_refused(file: Path, name: str, link: bool) -> None:
    path = file.parent / name
    path.parent.mkdir(exist_ok=True)
    file.rename(path)
    with pytest.raises(UsageError, match="rename") as raised:
        add(path, "one", link=link)
    assert left() == [] and "\n" not in str(raised.value)


def test_a_manifest_that_could_not_be_read_again_is_not_published(file: Path) -> None:
    entry = add(file, "one")
    entries.staging("one").mkdir()
    with pytest.raises(BackplaneError, match="cannot be recorded"):
        entries.publish(replace(entry, source=entries.Source("copy", "a\tb")))
    assert lookup("one") == entry


@pytest.mark.parametrize("source", ["/proc/self/mem", "/nonexistent/m.gguf"])
def test_a_source_that_cannot_be_read_is_named(tmp_path: Path, source: str) -> None:
    with pytest.raises(BackplaneError, match=f"^{source} cannot be read: "), entries.writing("one"):
        files.copy(Path(source), tmp_path / "copy", lambda _count: None)


def test_a_file_that_is_added_to_a_linked_folder_is_noticed(folder: Path) -> None:
    entry = add(folder, link=True)
    (folder / "NOTES.md").write_text("vLLM does not read this")
    assert entry.fault() is None
    (folder / "model.safetensors").write_bytes(save(A))
    assert entry.fault() == ("changed", "'model.safetensors' was added to the folder")
    with pytest.raises(BackplaneError, match=r"was added to the folder; run 'vllm-backplane model add .*--link"):
        serving.path_to_serve("tiny", print)


def truncate(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def lose_a_part(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def lose_a_part_without_index(folder: Path) -> None:
    lose_a_part(folder)
    (folder / "model.safetensors.index.json").unlink()


def pickle_only(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()


def lead_outside(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    (folder / "model-00002-of-00002.safetensors").rename(outside)
    (folder / "model-00002-of-00002.safetensors").symlink_to(outside)


def wait_for_a_writer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")


@pytest.mark.parametrize("link", [False, True], ids=["copy", "link"])
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (truncate, r"model-00002-of-00002\.safetensors is not a complete safetensors file"),
        (lose_a_part, r"has no 'model-00002-of-00002\.safetensors', in which"),
        (lose_a_part_without_index, r"and no model-00002-of-00002\.safetensors"),
        (lambda folder: write_index(folder, c="model-00001-of-00002.safetensors"), r"does not have the tensor 'c'"),
        (lambda folder: (folder / "config.json").unlink(), r"has no config\.json"),
        (lambda folder: (folder / "config.json").write_text("[]"), "is not a JSON object"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "cannot be read"),
        (pickle_only, r"'pytorch_model\.bin'.*can run code"),
        (lead_outside, r"is a link to .*/outside\.safetensors, outside of its folder"),
        (wait_for_a_writer, r"tokenizer\.json is not a file"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused(
    folder: Path, harm: Callable[[Path], object], reason: str, link: bool
) -> None:
    harm(folder)
    with pytest.raises(CheckpointError, match=reason):
        add(folder, link=link)
    assert left() == []


def test_links_of_a_hugging_face_cache_lead_to_its_blobs(folder: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--o--m/snapshots/abc", tmp_path / "models--o--m/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for one in folder.glob("*.*"):
        if one.is_file():
            one.rename(blobs / one.name)
            (snapshot / one.name).symlink_to(f"../../blobs/{one.name}")
    entry = add(snapshot)
    assert entry.name == "m"
    assert not any(one.is_symlink() for one in entry.folder.iterdir()) and entry.fault(contents=True) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [(WHOLE[:-1000], "not a valid GGUF"), (b"GGUF", "too few"), (b"?" * 5000, "not a valid GGUF")],
)
def test_a_file_that_is_no_whole_model_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=reason):
        add(tmp_path / "m.gguf")


def test_the_tensor_types_that_are_served_are_known_without_torch(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_backplane.gguf.decoding import SERVED

    assert {kind.name for kind in SERVED} == SERVED_TYPES
    monkeypatch.setattr(checkpoint, "SERVED_TYPES", SERVED_TYPES - {"F32"})
    with pytest.raises(CheckpointError, match="has the type F32, which is not served"):
        add(file)


def test_an_architecture_that_is_not_served_is_refused(file: Path) -> None:
    file.write_bytes(WHOLE.replace(b"llama", b"lxama"))
    with pytest.raises(CheckpointError, match="lxama"):
        add(file)


@pytest.mark.parametrize("given", ["nowhere", "config.json"])
def test_other_paths_are_refused(folder: Path, given: str) -> None:
    with pytest.raises(UsageError, match=r"does not exist|give the folder that it is in"):
        add(folder / given)


def test_too_little_space_is_reported_with_numbers(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 2048

    monkeypatch.setattr(files, "clone", lambda *_descriptors: False)
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: Usage)
    with pytest.raises(BackplaneError, match=r"needs \d+\.\d KiB more, and 2\.0 KiB are free.*BACKPLANE_CACHE"):
        add(file)
    assert left() == []
    add(file, link=True)


def test_a_disk_that_becomes_full_leaves_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_arguments: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "copy", fails)
    with pytest.raises(BackplaneError, match="the disk became full while tiny-Q8_0 was written"):
        add(file)
    assert left() == []


def test_a_file_that_is_changed_while_it_is_copied_is_refused(file: Path) -> None:
    def advance(_count: int) -> None:
        file.write_bytes(WHOLE + b"more")

    with pytest.raises(BackplaneError, match="was changed while it was copied"):
        files.copy(file, file.with_name("copy"), advance)


def test_an_interrupted_copy_leaves_nothing_and_what_a_killed_one_left_is_removed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: Any) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files, "copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            add(file)
    assert left() == []
    leftover = entries.staging("tiny-Q8_0") / entries.FILES
    leftover.mkdir(parents=True)
    (leftover / "half").write_bytes(b"?")
    assert entries.unfinished() == ["tiny-Q8_0"]
    add(file)
    assert left() == ["tiny-Q8_0"] and not (entries.read("tiny-Q8_0").folder / "half").exists()
    entries.staging("other").mkdir()
    assert adding.remove("other", force=False, progress=QUIET) == "other" and left() == ["tiny-Q8_0"]


def test_two_additions_of_a_name_at_once_make_one_model(file: Path) -> None:
    outcomes: list[object] = []

    def attempt() -> None:
        try:
            outcomes.append(add(file))
        except UsageError as fault:
            outcomes.append(str(fault))

    threads = [threading.Thread(target=attempt) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(one, Entry) for one in outcomes) == 1
    assert lookup("tiny-Q8_0") is not None and left() == ["tiny-Q8_0"]


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found | {"version": 2},
        lambda found: found | {"source": {"kind": "elsewhere"}},
        lambda found: found | {"source": {"kind": "link", "path": "relative"}},
        lambda found: found | {"files": {"../../../etc/passwd": {"size": 1, "sha256": "", "modified": 1}}},
        lambda found: found | {"files": {}},
        lambda found: found | {"main": "other"},
        lambda found: found | {"format": {"kind": "GGUF", "type": "\x1b[2J", "architecture": "x"}},
        lambda found: found | {"files": {"tiny-Q8_0.gguf": {"size": "1", "sha256": "", "modified": 1}}},
        lambda found: [],
    ],
)
def test_a_manifest_of_another_form_is_not_used(file: Path, change: Callable[[Any], Any], capsys: Any) -> None:
    add(file)
    manifest = entries.root() / "tiny-Q8_0" / entries.MANIFEST
    manifest.write_text(json.dumps(change(json.loads(manifest.read_text()))))
    with pytest.raises(BackplaneError, match=r"cannot be read .*model remove tiny-Q8_0"):
        serving.path_to_serve("tiny-Q8_0", print)
    assert main(["model", "list"]) == 0
    assert "unreadable" in capsys.readouterr().out.splitlines()[-1]
    adding.remove("tiny-Q8_0", force=False, progress=QUIET)
    assert names() == []


def test_a_folder_that_others_can_write_to_is_refused(file: Path, tmp_path: Path) -> None:
    add(file)
    entries.root().chmod(0o777)
    with pytest.raises(BackplaneError, match="is not a folder that only you can write to"):
        lookup("tiny-Q8_0")
    entries.root().chmod(0o700)
    entries.root().rename(tmp_path / "moved")
    entries.root().symlink_to(tmp_path / "moved")
    for access in (names, lambda: add(file, "another")):
        with pytest.raises(BackplaneError, match="is not a folder that only you can write to"):
            access()


def test_a_link_in_the_place_of_a_model_or_its_file_is_not_followed(file: Path, tmp_path: Path) -> None:
    entry = add(file)
    entry.path.rename(tmp_path / "m.gguf")
    entry.path.symlink_to(tmp_path / "m.gguf")
    assert entry.fault() == ("changed", "tiny-Q8_0.gguf is not a regular file")
    (entries.root() / "planted").symlink_to(file.parent)
    assert names() == ["tiny-Q8_0"]
    adding.remove("tiny-Q8_0", force=False, progress=QUIET)
    assert (tmp_path / "m.gguf").exists() and file.exists()


def test_a_model_that_a_process_has_mapped_is_removed_with_force_only(file: Path) -> None:
    entry = add(file)
    with entry.path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ):
        with pytest.raises(UsageError, match=f"is used by the process {os.getpid()}; end it first.*--force"):
            adding.remove("tiny-Q8_0", force=False, progress=QUIET)
        assert entry.path.exists()
        adding.remove("tiny-Q8_0", force=True, progress=QUIET)
    assert names() == []


def test_a_link_into_the_cache_is_refused(file: Path) -> None:
    entry = add(file)
    with pytest.raises(UsageError, match="belongs to an added model already"):
        add(entry.path, "again", link=True)
    assert add(entry.path, "copy").fault(contents=True) is None


def test_the_commands_list_verify_and_remove(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "add", str(file), "--name", "mine"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0].startswith("mine: GGUF F32, llama, ")
    assert "vllm-backplane serve mine" in captured.out and "copying mine" in captured.err
    assert main(["model", "list", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[-1]
    assert (row["name"], row["state"], row["format"]) == ("mine", "complete", "GGUF F32, llama")
    assert row["size"] == len(WHOLE) and row["source"] == f"copy of {file}"
    assert main(["model", "verify", "mine"]) == 0
    assert main(["model", "path", "mine"]) == 0
    path = Path(capsys.readouterr().out.splitlines()[-1])
    assert path.read_bytes() == WHOLE
    os.chmod(path, 0o600)
    path.write_bytes(WHOLE[:-1] + b"!")
    assert main(["model", "verify", "mine", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fault"] == "tiny-Q8_0.gguf has changed"
    assert main(["model", "remove", "mine"]) == 0 and names() == []
    assert capsys.readouterr().out == "mine: removed\n"
    assert main(["model", "add", str(file), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["name"] == "tiny-Q8_0" and captured.err == ""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("remove", "smollm2"), "is a bundled model"),
        (("remove", "mime"), "did you mean 'mine'"),
        (("path", "smolm2"), "did you mean 'smollm2'"),
        (("add", "org/model", "--link"), "--link is for a path"),
    ],
)
def test_mistakes_are_reported_with_the_remedy(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str
) -> None:
    add(file, "mine")
    assert main(["model", *arguments]) != 0
    captured = capsys.readouterr()
    assert reason in captured.err and captured.out == "" and len(captured.err.splitlines()) == 1


def test_a_name_is_served_before_a_folder_of_that_name_and_a_path_before_a_name_of_the_hub(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = add(file, "mine")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "org").mkdir()
    (tmp_path / "org/m:Q4_0").mkdir()
    assert serving.path_to_serve("mine", print) == entry.path
    for given in ("./mine", "org/m:Q4_0", "org/m", "unknown", "/a/b", "s3://bucket/m"):
        assert serving.path_to_serve(given, print) is None and not serving.is_served_by_name(given)
    assert serving.is_served_by_name("org/m:Q8_0") and serving.is_served_by_name("mine")


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    seconds = iter(range(0, 1000, 10))
    monkeypatch.setattr("vllm_backplane.added_models.progress.time.monotonic", lambda: next(seconds))
    with Progress(said.append, bars=False).bar("copying m", 8 << 30, 1 << 30) as advance:
        for _ in range(4):
            advance(1 << 30)
    assert said[0].startswith("copying m: ") and said[0].endswith(" of 8.0 GiB")
    with Progress(said.append, bars=True).bar("copying m", 8 << 30) as advance:
        advance(1 << 30)
    assert "copying m" in capsys.readouterr().err
    assert [size_text(size) for size in (5, 1024, 3 << 29, 1 << 50)] == ["5 bytes", "1.0 KiB", "1.5 GiB", "1024.0 TiB"]


@pytest.mark.models
@pytest.mark.parametrize("model", [DEFAULT, FULL_PRECISION], ids=lambda model: model.name)
def test_the_formats_of_bundled_models_are_those_of_their_headers(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BACKPLANE_CACHE")
    assert str(examine(obtain(model.name)).format) == model.format


@pytest.mark.process
def test_listing_and_adding_import_neither_torch_nor_vllm(file: Path) -> None:
    program = (
        "import sys\nfrom vllm_backplane.cli import main\n"
        f"assert main(['model', 'add', {str(file)!r}]) == 0 and main(['model', 'list']) == 0\n"
        "print([name for name in ('torch', 'vllm') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_names_of_models_have_no_suffix_or_part() -> None:
    assert checkpoint.name_of_file("sub/m-Q4_K_M-00001-of-00003.gguf") == "m-Q4_K_M"
