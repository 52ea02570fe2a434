"""Tests that vLLM's accelerator calls reach the device, and that PyTorch itself stays as it is."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests import programs
from tests.environment import AT_START
from vllm_backplane.process.vllm_torch import HostEvent, View

SNAPSHOT = """
import json, sys, torch
import torch._dynamo  # it replaces torch.manual_seed itself

def attributes():
    modules = {"torch": torch, "torch.cuda": torch.cuda, "torch.accelerator": torch.accelerator, "torch.cpu": torch.cpu}
    return {f"{module}.{name}": value for module, of in modules.items() for name, value in vars(of).items()}

before = attributes()
"""
ENGINE = """
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[2], max_model_len=64, max_num_seqs=2, dtype="float32", skip_tokenizer_init=True,
              kv_cache_memory_bytes=1 << 24, disable_log_stats=True)
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
    [output] = llm.generate({"prompt_token_ids": [1, 2, 3]}, sampling, use_tqdm=False)
    now = attributes()
    import vllm.v1.worker.gpu_model_runner as runner
    json.dump({
        "tokens": len(output.outputs[0].token_ids),
        "changed": sorted(name for name, value in before.items() if now.get(name) is not value),
        "of vLLM": [f"{each.__module__}.{each.__qualname__}" for each in (
            runner.torch.cuda.Event, runner.torch.cuda.Stream, runner.torch.cuda.stream, runner.torch.Event,
            runner.torch.accelerator.synchronize)],
        "same": runner.torch.Tensor is torch.Tensor and runner.torch.nn is torch.nn,
        "not bound": sorted(name for name, module in list(sys.modules.items())
                            if name.partition(".")[0] == "vllm" and vars(module).get("torch") is torch),
    }, open(sys.argv[1], "w"))
"""
HOST = "vllm_backplane.process.vllm_torch."
EXPECTED = {
    "cpu": [
        HOST + "HostEvent",
        HOST + "HostStream",
        "torch.cpu.stream",
        HOST + "HostEvent",
        HOST + "_replace_by_host_calls.<locals>.synchronize",
    ],
    "sim": [
        *(f"vllm_backplane.devices.sim.bpnpu.{name}" for name in ("Event", "Stream", "stream")),
        "torch.Event",
        "torch.accelerator.synchronize",
    ],
}
"""The objects that vLLM's modules find, by device."""
CHANGED_BY_VLLM = ["torch.cuda.set_stream"]
"""What vLLM itself replaces on every platform (vllm/utils/torch_utils.py)."""


@pytest.mark.process
@pytest.mark.parametrize("device", EXPECTED)
def test_an_engine_in_the_process_of_a_user_changes_nothing_in_pytorch(device: str, tmp_path: Path) -> None:
    """Tests every attribute of the modules whose calls vLLM makes, after a whole run of an engine in this process."""
    model = tmp_path / "model"
    save(model)
    result = tmp_path / "found.json"
    variables = {"BACKPLANE_DEVICE": device, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "BACKPLANE_SIM_MEMORY": "2GiB"}
    run = programs.run(programs.command(SNAPSHOT + ENGINE, str(result), str(model)), env={**AT_START, **variables})
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(result.read_text())
    assert found["tokens"] == 4
    assert found["changed"] == CHANGED_BY_VLLM
    assert found["of vLLM"] == EXPECTED[device]
    assert found["same"]
    assert found["not bound"] == []


def save(folder: Path) -> None:
    """Saves a model of one small layer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)


def test_a_view_replaces_attributes_for_its_users_only() -> None:
    module = ModuleType("module")
    module.event, module.other = "of the module", "other"  # type: ignore[attr-defined]
    view = View(module)
    view.replace(event="of the view")
    assert (view.event, module.event, view.other) == ("of the view", "of the module", "other")
    module.other = "changed"  # type: ignore[attr-defined]
    assert view.other == "changed"
    view.added = 1
    assert module.added == 1
    with pytest.raises(AttributeError, match="missing"):
        _ = view.missing


def test_host_events_measure_time() -> None:
    first, second = HostEvent(enable_timing=True), HostEvent()
    first.record()
    second.record()
    assert first.elapsed_time(second) >= 0
    assert second.query()
