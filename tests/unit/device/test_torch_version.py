"""Tests that a kernel library for another PyTorch is refused before it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from packaging.version import Version

from vllm_backplane.device.torch_version import require_same_torch, stated_version
from vllm_backplane.devices.cpu import native
from vllm_backplane.devices.sim import library as sim
from vllm_backplane.errors import BackplaneError

LIBRARIES = {"cpu": Path(native.__file__).with_name(native.LIBRARY_NAME), "sim": sim.PATH}


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_built_library_states_the_installed_release(name: str) -> None:
    assert Version(stated_version(LIBRARIES[name])).base_version == Version(torch.__version__).base_version
    require_same_torch(LIBRARIES[name], torch.__version__)


def test_builds_of_one_release_fit_each_other(tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    library.write_bytes(b"\x7fELF\0vllm-backplane: built for PyTorch 2.13.0+cpu;\0")
    require_same_torch(library, "2.13.0+cu130")
    for other in ("2.13.1+cpu", "2.12.0", "3.0.0", "2.13.0.dev20250101+cpu", "2.13.0rc1"):
        with pytest.raises(BackplaneError, match=r"was built for PyTorch 2\.13\.0\+cpu, and .* is installed; install"):
            require_same_torch(library, other)


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"\x7fELF without a version", "does not state"),
        (b"vllm-backplane: built for PyTorch " + b"9" * 200, "does not state"),
        (b"vllm-backplane: built for PyTorch ;", "does not state"),
        (b"", "cannot be read"),
    ],
)
def test_a_library_without_a_version_is_refused(contents: bytes, words: str, tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    library.write_bytes(contents)
    with pytest.raises(BackplaneError, match=words):
        require_same_torch(library, torch.__version__)


def test_it_is_refused_before_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = LIBRARIES["cpu"].read_bytes().replace(b"built for PyTorch 2", b"built for PyTorch 1", 1)
    (tmp_path / "kernels.so").write_bytes(other)
    monkeypatch.setattr(native, "_PATH", tmp_path / "kernels.so")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail(f"{path} was loaded"))
    with pytest.raises(BackplaneError, match="was built for PyTorch 1"):
        native.load.__wrapped__()
