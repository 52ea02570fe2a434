"""Tests that the general plugin changes nothing under another platform, writes no files, and may be loaded twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.environment import AT_START
from vllm_backplane.gguf.hf_config import QUANTIZATION
from vllm_backplane.kv_offload.settings import NAME as OFFLOAD_CONNECTOR
from vllm_backplane.weights.load_formats import ALL_SHARED, PEER

pytestmark = pytest.mark.process

LOAD_TWICE = """
import json, logging, os, sys
os.environ["HOME"] = sys.argv[2]  # here, because a program with another HOME would not be forked (tests/warm_start.py)
for name in [name for name in os.environ if name.startswith("XDG_")]:
    del os.environ[name]
logging.basicConfig(level=logging.INFO)
import vllm.plugins
import vllm_backplane
from vllm.model_executor.custom_op import op_registry_oot
from vllm.platforms import current_platform

current_platform.device_type  # chooses the platform
home = os.environ["HOME"]

def written():
    return sorted(os.path.join(at, name) for at, folders, files in os.walk(home) for name in folders + files)

def state():
    from vllm.engine.arg_utils import EngineArgs
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.entrypoints.launchers import launcher
    from vllm.model_executor import model_loader
    from vllm.transformers_utils import config
    return {
        "layers": sorted((name, id(replacement)) for name, replacement in op_registry_oot.items()),
        "patched": [
            id(launcher.serve_http), id(config.maybe_override_with_speculators),
            id(EngineArgs._set_default_chunked_prefill_and_prefix_caching_args),
        ],
        "load formats": sorted((name, id(kind)) for name, kind in model_loader._LOAD_FORMAT_TO_MODEL_LOADER.items()),
        "KV connectors": sorted((name, id(found)) for name, found in KVConnectorFactory._registry.items()),
    }

before, found = state(), written()
vllm.plugins.load_general_plugins()
first = state()
vllm.plugins.plugins_loaded = False
vllm.plugins.load_general_plugins()
json.dump({
    "platform": type(current_platform).__name__,
    "states": [before, first, state()],
    "IO processor": vllm_backplane.register_documents(),
    "written": sorted(set(written()) - set(found)),
    "modules": [name for name in sys.modules if name.startswith("vllm_backplane.")],
}, open(sys.argv[1], "w"))
"""


REGISTERED = {
    "load formats": {QUANTIZATION, PEER, *ALL_SHARED},
    "KV connectors": {OFFLOAD_CONNECTOR},
}


def loaded(folder: Path, **variables: str | None) -> tuple[dict[str, Any], str]:
    """Runs the program, and returns what it found and its output."""
    (folder / "home").mkdir()
    kept = {name: value for name, value in AT_START.items() if not name.startswith(("BACKPLANE_", "VLLM_"))}
    result = folder / "found.json"
    own = {"VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": "backplane"}
    done = programs.run(
        programs.command(LOAD_TWICE, str(result), str(folder / "home")),
        env={name: value for name, value in {**kept, **own, **variables}.items() if value is not None},
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(result.read_text()), done.stdout + done.stderr


def test_under_another_platform_it_does_nothing_and_logs_that_once(tmp_path: Path) -> None:
    found, output = loaded(tmp_path, VLLM_TARGET_DEVICE="cpu", VLLM_PLUGINS=None)
    assert found["platform"] != "BackplanePlatform"
    before, first, second = found["states"]
    assert before == first == second
    assert before["layers"] == []
    assert found["IO processor"] is None
    # The page only keeps its own name out of a warning of vLLM, which would concern nobody here.
    small = ("errors", "page", "page.loading", "platform_choice", "plugin")
    assert set(found["modules"]) <= {f"vllm_backplane.{name}" for name in small}
    assert found["written"] == []
    assert output.count("Backplane is installed and not used: VLLM_TARGET_DEVICE=cpu is set") == 1


def test_on_its_platform_the_second_time_changes_nothing(tmp_path: Path) -> None:
    found, _ = loaded(tmp_path)
    assert found["platform"] == "BackplanePlatform"
    assert found["IO processor"] == "vllm_backplane.io_processors.documents.DocumentProcessor"
    before, first, second = found["states"]
    assert first["layers"] and first["layers"] != before["layers"]
    for registry in ("load formats", "KV connectors"):
        names = [{name for name, _ in state[registry]} for state in (before, first)]
        assert REGISTERED[registry] == names[1] - names[0]
    assert second == first
    assert found["written"] == []


def test_a_requested_device_is_not_passed_over(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Backplane is requested by BACKPLANE_DEVICE=cpu, but") as raised:
        loaded(tmp_path, VLLM_TARGET_DEVICE="cpu", BACKPLANE_DEVICE="cpu")
    assert "VLLM_TARGET_DEVICE=cpu is set" in str(raised.value)


def test_a_named_plugin_is_not_passed_over(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Backplane is requested by VLLM_PLUGINS=backplane, but"):
        loaded(tmp_path, VLLM_TARGET_DEVICE="cpu")
