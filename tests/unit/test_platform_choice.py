"""Tests when Backplane becomes vLLM's platform, and that it yields to other platforms unless it was asked for."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.environment import AT_START
from vllm_backplane import platform_choice
from vllm_backplane.cli import main
from vllm_backplane.doctor import vllm_checks
from vllm_backplane.doctor.subprocess_checks import CheckResult
from vllm_backplane.platform_choice import decide

ACCELERATORS = ("none", "in-tree", "in-tree without kernels")
FOREIGN = ("none", "active", "inactive", "broken", "filtered out")
REQUESTS: dict[str, dict[str, str]] = {
    "not": {},
    "by variable": {"BACKPLANE_DEVICE": "cpu"},
    "by command": {"BACKPLANE_COMMAND": "serve"},
    "by plugin list": {"VLLM_PLUGINS": "other,backplane"},
}
YIELDS_TO_FOREIGN = "the platform plugin 'foreign' of foreign-npu is active"
YIELDS_TO_ACCELERATOR = "this vLLM serves the machine's accelerator (xpu) itself"


class ForeignPlugin:
    """Stands in for an entry point of another distribution."""

    name, value = "foreign", "foreign_npu:register"

    class dist:  # as importlib.metadata names it
        name = "foreign-npu"

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def load(self) -> Any:
        if self.kind == "broken":
            raise ImportError("no driver")
        return lambda: "foreign_npu.Platform" if self.kind == "active" else None


class OurPlugin:
    """Stands in for our own entry point, which must not be called."""

    name, value, dist = "backplane", "vllm_backplane:register_platform", None

    def load(self) -> Any:
        raise AssertionError("Backplane asks itself")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that simulates a machine with an accelerator and a plugin of another distribution."""
    import vllm.platforms

    def simulate(accelerator: str, foreign: str) -> dict[str, str]:
        found = [
            OurPlugin(),
            *([] if foreign == "none" else [ForeignPlugin(foreign.replace("filtered out", "active"))]),
        ]
        monkeypatch.setattr(
            platform_choice, "entry_points", lambda group: found if group == "vllm.platform_plugins" else []
        )
        detectors = {name: lambda: None for name in vllm.platforms.builtin_platform_plugins}
        detectors["cpu"] = vllm.platforms.cpu_platform_plugin  # type: ignore[assignment]
        monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")  # so that it detects a CPU
        if accelerator != "none":
            detectors["xpu"] = lambda: "vllm.platforms.xpu.XPUPlatform"  # type: ignore[assignment,return-value]
        monkeypatch.setattr(vllm.platforms, "builtin_platform_plugins", detectors)
        kernels = {"vllm_xpu_kernels": object()} if accelerator == "in-tree" else {}
        monkeypatch.setattr(platform_choice, "find_spec", kernels.get)
        return {"VLLM_PLUGINS": "others"} if foreign == "filtered out" else {}

    return simulate


@pytest.mark.parametrize("request_", [name for name in REQUESTS if name != "not"])
@pytest.mark.parametrize(("accelerator", "foreign"), [*itertools.product(ACCELERATORS, FOREIGN)])
def test_it_activates_where_it_is_asked_for(machine: Any, accelerator: str, foreign: str, request_: str) -> None:
    found = decide({**machine(accelerator, foreign), **REQUESTS[request_]})
    assert found.activates
    assert found.reason.startswith("requested by ")


@pytest.mark.parametrize(
    ("accelerator", "foreign", "reason"),
    [
        ("none", "none", None),
        ("none", "active", YIELDS_TO_FOREIGN),
        ("none", "inactive", None),
        ("none", "broken", None),
        ("none", "filtered out", None),
        ("in-tree", "none", YIELDS_TO_ACCELERATOR),
        ("in-tree", "active", YIELDS_TO_FOREIGN),
        ("in-tree", "inactive", YIELDS_TO_ACCELERATOR),
        ("in-tree", "broken", YIELDS_TO_ACCELERATOR),
        ("in-tree", "filtered out", YIELDS_TO_ACCELERATOR),
        ("in-tree without kernels", "none", None),
        ("in-tree without kernels", "active", YIELDS_TO_FOREIGN),
        ("in-tree without kernels", "inactive", None),
        ("in-tree without kernels", "broken", None),
        ("in-tree without kernels", "filtered out", None),
    ],
)
def test_otherwise_it_yields_to_others(machine: Any, accelerator: str, foreign: str, reason: str | None) -> None:
    found = decide(machine(accelerator, foreign))
    assert found.activates == (reason is None)
    assert reason is None or found.reason == reason


def test_a_plugin_that_asks_back_gets_an_answer(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rival that yields in the same way calls our entry point while ours calls it."""
    machine("none", "inactive")
    answers = []

    class Rival(ForeignPlugin):
        def load(self) -> Any:
            return lambda: answers.append(decide({}).activates)

    monkeypatch.setattr(platform_choice, "entry_points", lambda group: [Rival("inactive")])
    assert decide({}).activates
    assert answers == [False]


@pytest.mark.process
def test_serve_names_the_rival_and_the_remedy(
    machine: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine("none", "active")
    for name in ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["serve", "--dry-run"]) != 0
    error = capsys.readouterr().err
    assert "the platform plugin 'foreign' of foreign-npu is active too, and vLLM accepts one platform" in error
    assert "set VLLM_PLUGINS=" in error and "backplane" in error.partition("set VLLM_PLUGINS=")[2]


def test_a_detection_that_raises_is_recorded_and_reported(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.platforms

    given = machine("none", "none")
    monkeypatch.setattr(platform_choice, "failures", {})

    def fail() -> None:
        raise OSError("the driver is too old")

    monkeypatch.setitem(vllm.platforms.builtin_platform_plugins, "xpu", fail)
    assert decide(given).activates
    assert platform_choice.failures == {"xpu": "OSError: the driver is too old"}
    described = {
        "class": "a.Platform",
        "ours": True,
        "yields": False,
        "reason": "",
        "failures": platform_choice.failures,
    }
    _, [finding] = vllm_checks._judge_platform(CheckResult(described))
    assert finding.severity == "warning"
    assert "detection of the accelerator 'xpu' failed" in finding.what and "the driver is too old" in finding.what


# --- with vLLM itself -------------------------------------------------------------------------------------------------

PROGRAM = """
import json, logging, sys, torch
from vllm_patchbay.patch.import_hook import when_imported
logging.basicConfig(level=logging.INFO)

def add_accelerator():
    vllm_platforms = sys.modules["vllm.platforms"]
    if "accelerator" in sys.argv[2]:
        vllm_platforms.builtin_platform_plugins["xpu"] = lambda: "foreign_npu.Accelerator"

when_imported("vllm.platforms", add_accelerator)  # vLLM 0.30 and 0.31 choose the platform while vllm is imported
found = {}
try:
    import vllm.platforms
    found["platform"] = type(vllm.platforms.current_platform).__name__
    vllm.plugins.load_general_plugins()
    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()
except Exception as error:
    found["error"] = str(error)
if "error" not in found:
    import vllm.utils.torch_utils
    found["unchanged"] = vllm.utils.torch_utils.torch is torch and "vllm_backplane.platform" not in sys.modules
    from vllm.model_executor.custom_op import op_registry_oot
    found["replaced layers"] = len(op_registry_oot)
json.dump(found, open(sys.argv[1], "w"))
"""
PLATFORMS = """
from vllm.platforms.interface import Platform, PlatformEnum

class ForeignPlatform(Platform):
    _enum = PlatformEnum.OOT
    device_name = device_type = "foreign"

class Accelerator(ForeignPlatform):
    pass

def register():
    return "foreign_npu.ForeignPlatform"
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the modules of a foreign platform plugin, and kernels of an in-tree accelerator."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "foreign_npu.py").write_text(PLATFORMS)
    (folder / "vllm_xpu_kernels.py").touch()
    plugin = folder / "plugin" / "foreign_npu-1.0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-npu\nVersion: 1.0\n")
    (plugin / "entry_points.txt").write_text("[vllm.platform_plugins]\nforeign = foreign_npu:register\n")
    return folder


def platform_of(site: Path, folder: Path, present: str, **variables: str) -> tuple[dict[str, Any], str]:
    """Returns what vLLM does in a process, and the process's output."""
    folders = [site, *([site / "plugin"] if "plugin" in present else [])]
    plain = {name: value for name, value in AT_START.items() if not name.startswith(("BACKPLANE_", "VLLM_"))}
    result = folder / "found.json"
    command = programs.command(PROGRAM, str(result), present)
    done: subprocess.CompletedProcess[str] = programs.run(
        command, env={**plain, "PYTHONPATH": programs.on_path(*folders), **variables}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(result.read_text()), done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("present", "platform", "reason"),
    [
        ("nothing", "BackplanePlatform", None),
        ("accelerator", "Accelerator", YIELDS_TO_ACCELERATOR),
        ("plugin", "ForeignPlatform", YIELDS_TO_FOREIGN),
        ("accelerator and plugin", "ForeignPlatform", YIELDS_TO_FOREIGN),
    ],
)
def test_vllm_runs_on(site: Path, tmp_path: Path, present: str, platform: str, reason: str | None) -> None:
    found, output = platform_of(site, tmp_path, present)
    assert "error" not in found
    assert found["platform"] == platform
    if reason is None:
        assert found["replaced layers"]
        assert "not used" not in output
    else:
        assert found["unchanged"] and not found["replaced layers"]
        assert output.count(f"Backplane is installed and not used: {reason}. {platform_choice.HOW_TO_CHOOSE}.") == 1
        [line] = [line for line in output.splitlines() if "not used" in line]
        assert line.startswith("INFO")


@pytest.mark.process
def test_vllm_runs_on_backplane_beside_an_accelerator_if_asked_to(site: Path, tmp_path: Path) -> None:
    found, _ = platform_of(site, tmp_path, "accelerator", BACKPLANE_DEVICE="cpu")
    assert "error" not in found
    assert found["platform"] == "BackplanePlatform"


@pytest.mark.process
def test_vllm_refuses_two_plugins_if_backplane_is_asked_for(site: Path, tmp_path: Path) -> None:
    found, _ = platform_of(site, tmp_path, "plugin", BACKPLANE_DEVICE="cpu")
    assert "Only one platform plugin can be activated" in found["error"]
