"""Tests linear layers whose weights the device rearranges, against float64 results."""

from __future__ import annotations

import json
import os
import platform
import subprocess

import pytest

from tests import programs

pytestmark = pytest.mark.process

SCRIPT = """
import json, sys, torch
from vllm.platforms import current_platform
from vllm_backplane.errors import BackplaneError
from vllm_backplane.layers.linear import BackplaneLinearMethod
from vllm_backplane.runtime import runtime
runtime().device.load_kernels()
method, report = BackplaneLinearMethod(), {}
generator = torch.Generator().manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    layer = torch.nn.Module()
    weight = torch.randn(70, 48, generator=generator).to(dtype)
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    x, bias = torch.randn(5, 48, generator=generator).to(dtype), torch.randn(70, generator=generator).to(dtype)
    exact = x.double() @ weight.double().T + bias.double()
    method.process_weights_after_loading(layer)
    got = method.apply(layer, x, bias)
    report[str(dtype)] = [list(layer.weight.shape), (got.double() - exact).abs().max().item()]
    if layer.weight.dim() > 2:
        try:
            layer.weight.weight_loader(layer.weight, weight)
        except BackplaneError as fault:
            report["refused"] = str(fault)
kernel = torch.nn.Module()
kernel.weight = torch.nn.Parameter(torch.ones(8, 1, 4, dtype=torch.bfloat16), requires_grad=False)
method.process_weights_after_loading(kernel)
report["convolution"] = list(kernel.weight.shape)
import os
report["start method"] = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def report() -> dict[str, list[float]]:
    variables = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    variables.pop("VLLM_WORKER_MULTIPROC_METHOD", None)
    run = subprocess.run(programs.command(SCRIPT), env=variables, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_weights_without_instructions_for_them_are_arranged(report: dict[str, list[float]]) -> None:
    shape, error = report["torch.bfloat16"]
    assert len(shape) == 5
    assert error < 0.2  # one rounding of sums near 20


def test_float32_weights_are_arranged_on_arm_alone(report: dict[str, list[float]]) -> None:
    assert report["torch.float32"][0] == ([5, 16, 48] if platform.machine() == "aarch64" else [70, 48])
    assert report["torch.float32"][1] < 1e-4


def test_an_arranged_weight_refuses_to_be_loaded_into(report: dict[str, list[float]]) -> None:
    assert "reload_weights" in report["refused"]


def test_a_convolution_is_left_alone(report: dict[str, list[float]]) -> None:
    assert report["convolution"] == [8, 1, 4]


def test_processes_are_forked_by_default(report: dict[str, list[float]]) -> None:
    assert report["start method"] == "fork"
