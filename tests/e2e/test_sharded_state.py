"""Tests `save_sharded_state`: `--load-format sharded_state` reads its result.

It must be refused if the weights were converted to another layout after loading.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import batch, greedy, job, run_engines
from processes import SIM

from vllm_backplane.devices.cpu import CpuDevice

pytestmark = pytest.mark.server

DEVICES: dict[str, dict[str, str]] = {
    "cpu": {"BACKPLANE_DEVICE": "cpu"},
    "sim": SIM,
}
PROMPTS = [[7, 300, 21, 9000, 44], list(range(1000, 1040))]


@pytest.mark.parametrize("device", ["cpu", pytest.param("sim", marks=pytest.mark.exhaustive)])
def test_what_is_saved_can_be_loaded(device: str, tiny_llama: Path, tmp_path: Path) -> None:
    arranged = device == "cpu" and CpuDevice().arrange_linear(torch.zeros(64, 64)) is not None
    saved, quantized = tmp_path / "saved", tmp_path / "quantized"
    for folder in (saved, quantized):
        folder.mkdir()
    shutil.copy(tiny_llama / "config.json", saved)
    work, limits = batch(PROMPTS, greedy(8)), {"skip_tokenizer_init": True, "enable_prefix_caching": False}

    def saving(folder: Path, **more: Any) -> dict[str, Any]:
        return job(tiny_llama, work, steps=[{"save": str(folder)}, {"batch": work}], **limits, **more)

    jobs = [saving(saved), saving(quantized, quantization="int8")]
    if not arranged:
        jobs.append(job(saved, work, load_format="sharded_state", **limits))
    plain, codes, *loaded = run_engines(tmp_path, jobs, DEVICES[device], device=device)
    for result in (plain, codes):
        assert result["steps"][1] == result["batches"][0], "saving must not change the outputs"
    assert "are quantized (int8), in the device's own layout. Load the original checkpoint" in codes["steps"][0]
    assert not list(quantized.iterdir())
    if arranged:
        assert "qkv_proj.weight, were rearranged for this device after loading" in plain["steps"][0]
        assert not list(saved.glob("*.safetensors"))
    else:
        assert plain["steps"][0] == ""
        assert [one["batches"][0] for one in loaded] == [plain["batches"][0]]
