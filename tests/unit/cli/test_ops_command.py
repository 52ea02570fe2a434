"""`vllm-backplane ops` reports the operators of layers and their implementations as they are."""

from __future__ import annotations

import ast
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_backplane
from tests import programs
from tests.environment import AT_START
from vllm_backplane import ops
from vllm_backplane.binding.operator_callers import HOOKS, IR_OPERATOR, OWN_CALLERS, RUNNER_KERNEL, callers
from vllm_backplane.binding.registry import BINDINGS
from vllm_backplane.cli import main

PACKAGE = Path(vllm_backplane.__file__).parent


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for variable in [name for name in os.environ if name.startswith("BACKPLANE_")]:
        monkeypatch.delenv(variable)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = os.path.join(os.path.dirname(sys.executable), "vllm-backplane")
    plain = {name: value for name, value in AT_START.items() if not name.startswith("BACKPLANE_")}
    return programs.run([script, "ops", *arguments], env=plain | variables)


@pytest.mark.process
def test_the_table_has_a_line_for_every_caller():
    done = run("--device", "cpu")
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.splitlines()
    *lines, empty, summary, linear = lines
    assert header.split() == ["LAYER", "KIND", "OPERATOR", "IMPLEMENTATION", "PROVIDER", "REASON"]
    assert empty == ""
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    pairs = {(kind, layer, operator) for layer, kind, operator, *_ in cells}
    assert pairs == {(kind, layer, name) for name, by in callers().items() for kind, layer in by}
    assert ("layer", "SiluAndMul", "silu_and_mul") in pairs
    assert ("attention backend", "AttentionImpl", "paged_attention") in pairs
    assert {row[3] for row in cells} <= {"kernel", "reference"}
    assert summary.startswith(f"{len(ops.__all__)} operators on device cpu: ")
    assert ("float32 blocked_linear" if platform.machine() == "aarch64" else "float32 linear") in linear


@pytest.mark.process
def test_a_forced_reference_is_shown_as_one_and_why():
    done = run("--json", "--family", "linear", BACKPLANE_DEVICE="cpu", BACKPLANE_REFERENCE_OPS="linear")
    report = json.loads(done.stdout)
    assert set(report) == {"device", "reason", "operators", "linear"}
    assert report["device"] == "cpu"
    assert report["reason"] == "requested by BACKPLANE_DEVICE"
    lines = {line["operator"]: line for line in report["operators"]}
    linear, other = lines["linear"], lines["blocked_linear"]
    assert other["implementation"] == "kernel"
    assert linear["implementation"] == "reference"
    assert linear["provider"] == "vllm_backplane.ops.linear"
    assert linear["reason"] == "forced by option reference_ops"
    assert {"kind": "layer", "layer": "QKVParallelLinear"} in linear["called_by"]


@pytest.mark.process
@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN's limit is of x86")
def test_it_reports_what_multiplies_by_weights_of_a_type():
    report = json.loads(run("--json", BACKPLANE_DEVICE="cpu", ONEDNN_MAX_CPU_ISA="AVX512_CORE").stdout)
    assert report["linear"] == {"float32": "linear", "bfloat16": "blocked_linear", "float16": "blocked_linear"}


@pytest.mark.process
def test_what_it_reports_is_what_the_dispatcher_does():
    """Runs in a subprocess, because kernels cannot be unloaded."""
    program = (
        "import torch\n"
        "from vllm_backplane.cli import main\n"
        "main(['ops', '--device', 'cpu', '--json'])\n"
        "print('---')\n"
        "from vllm_backplane import ops\n"
        "for name in ops.__all__:\n"
        "    table = torch._C._dispatch_dump_table(f'backplane::{name}').splitlines()\n"
        "    [line] = [line for line in table if line.startswith('CPU:')]\n"
        "    print(name, 'default backend kernel' in line)\n"
    )
    done = programs.run([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
    report, _, dispatched = done.stdout.partition("---")
    uses_default = dict(line.split() for line in dispatched.split("\n") if line)
    assert set(uses_default.values()) <= {"True", "False"}
    assert {line["operator"]: line["implementation"] for line in json.loads(report)["operators"]} == {
        name: "reference" if default == "True" else "kernel" for name, default in uses_default.items()
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--family", "norm"], ["no operators of family 'norm'", "did you mean 'norms'?"]),
        (["--device", "cpuu"], ["--device requests device 'cpuu'", "did you mean 'cpu'?"]),
    ],
)
def test_what_is_not_there_is_an_error(arguments, words, capsys):
    assert main(["ops", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    for word in words:
        assert word in captured.err


def test_an_unknown_variable_is_an_error(capsys, monkeypatch):
    monkeypatch.setenv("BACKPLANE_DEVCE", "cpu")
    assert main(["ops"]) == 2
    assert "did you mean 'BACKPLANE_DEVICE'?" in capsys.readouterr().err


# --- the declarations behind it ---------------------------------------------------------------------------------------


def test_every_operator_is_called_by_something_and_nothing_calls_an_unknown_one():
    assert set(callers()) == set(ops.__all__)


def calls_of(module: str) -> dict[str, set[str]]:
    """Returns the operators that each top-level class or function of a module calls (``ops.NAME(…)`` or
    ``ops.NAME.call(…)``)."""
    source = (PACKAGE.parent / Path(*module.split("."))).with_suffix(".py").read_text()
    return {
        node.name: {
            inner.attr
            for inner in ast.walk(node)
            if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "ops"
        }
        for node in ast.parse(source).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }


def test_a_module_calls_the_operators_that_its_declarations_name():
    declared: dict[str, set[str]] = {}
    for bound in (*BINDINGS, *HOOKS):
        declared.setdefault(bound.replacement.partition(":")[0], set()).update(bound.operators)
    for module, operators in declared.items():
        assert operators == set().union(*calls_of(module).values()), module


def test_a_hook_calls_its_operators_itself():
    for hook in HOOKS:
        module, _, name = hook.replacement.partition(":")
        assert set(hook.operators) == calls_of(module)[name], hook


def test_no_operator_is_called_from_a_module_without_a_declaration():
    declared = {bound.replacement.partition(":")[0] for bound in (*BINDINGS, *HOOKS)}
    declared |= {caller.path.partition(":")[0] for caller in OWN_CALLERS}
    outside = []
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        if module.split(".")[1] not in ("ops", "devices") and module not in declared and any(calls_of(module).values()):
            outside.append(module)
    assert outside == []


def test_hooks_of_registries_are_those_that_are_registered():
    from vllm_backplane.binding import ir
    from vllm_backplane.runner import triton_replacements

    kernels = {
        hook.upstream.replace(":", "."): hook.replacement.partition(":")[2]
        for hook in HOOKS
        if hook.kind == RUNNER_KERNEL
    }
    assert kernels == {name: replacement.__name__ for name, replacement in triton_replacements.REPLACEMENTS.items()}
    assert {hook.layer: hook.operators for hook in HOOKS if hook.kind == IR_OPERATOR} == ir.BOUND


@pytest.mark.process
def test_a_device_that_counts_reports_what_the_host_did():
    done = run("--device", "sim", "--family", "sampling")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("No reference runs a PyTorch operator on the host")
    report = json.loads(run("--device", "sim", "--family", "sampling", "--json").stdout)
    assert [line["fell_back"] for line in report["operators"]] == [{}] * len(report["operators"])
