"""Tests the numeric guard in engines: it reports where a fault arises, and does not change the outputs of clean runs.

The simulated NPU injects faults. The cpu device cannot, so it loads a checkpoint with a bad weight.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from engine import Result, batch, greedy, job, require_backplane, try_engines
from processes import SIM

pytestmark = [pytest.mark.server, pytest.mark.models]

LAYERS = 4
"""Layers of the tiny model. Every forward pass launches the activation once per layer, so the number of a launch
determines the layer."""
IDS = [[7, 300, 21, 9000, 44], list(range(1000, 1100)), [40000]]
TOKENS = 72
WORK = batch(IDS, greedy(TOKENS))


def launch_in(layer: int, forward: int = 50) -> str:
    """Returns the fault selector for the launch of the activation in a layer of a forward pass.

    The default forward pass comes after those of the start, when all three requests are in the batch.
    """
    return f"backplane::silu_and_mul,nth={(forward - 1) * LAYERS + layer + 1}"


@dataclass(frozen=True)
class Run:
    """Holds the result and the log of one engine."""

    result: Result
    log: str

    def report(self) -> str:
        """Returns the reports of the guard from the log; the client of an engine gets only EngineDeadError."""
        found = re.findall(r"NumericFault: (.*)", self.log)
        assert found, self.log[-4000:]
        return "\n".join(found)


def run(folder: Path, jobs: dict[str, dict[str, Any]], variables: dict[str, str | None]) -> dict[str, Run]:
    """Runs the jobs, and returns each result with its part of the log."""
    results, log = try_engines(folder, list(jobs.values()), variables)
    logs = re.split(r"^=== engine \d+: .*$", log.read_text(errors="replace"), flags=re.MULTILINE)[1:]
    return {name: Run(result, text) for name, result, text in zip(jobs, results, logs, strict=True)}


def with_bad_weight(model: Path, folder: Path) -> Path:
    """Returns a copy of the checkpoint in which one weight is NaN."""
    from safetensors.torch import load_file, save_file

    bad = Path(shutil.copytree(model, folder / "bad-weight"))
    (file,) = bad.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][5, 7] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    return bad


@pytest.fixture(scope="module")
def cpu_runs(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("guard-cpu")
    guard = {"additional_config": {"backplane": {"numeric_guard": "all"}}}
    jobs = {
        "off": job(tiny_llama, WORK),
        "clean": job(tiny_llama, WORK, **guard),
        "bad weight": job(with_bad_weight(tiny_llama, folder), WORK, **guard),
    }
    return run(folder, jobs, {"BACKPLANE_DEVICE": "cpu"})


@pytest.fixture(scope="module")
def runs(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    def guarded(guard: str, faults: str | None = None, **engine: Any) -> dict[str, Any]:
        section: dict[str, Any] = {"numeric_guard": guard, "sim": {"faults": faults} if faults else {}}
        return job(tiny_llama, WORK, additional_config={"backplane": section}, **engine)

    jobs = {
        "off": guarded("off"),
        "clean": guarded("all"),
        "nan": guarded("modules", f"corrupt@launch={launch_in(2)},kind=nan,elements=3"),
        "nan, layers": guarded("layers", f"corrupt@launch={launch_in(1)},kind=nan"),
        "flipped": guarded("modules", f"corrupt@launch={launch_in(3)},kind=bitflip,elements=64"),
        "unseen": guarded("off", f"corrupt@launch={launch_in(2)},kind=nan,elements=3"),
        "copy": guarded("copies", "corrupt@copy=copy_h2d,nth=20,kind=bitflip"),
        "two cards": guarded("all", f"corrupt@launch={launch_in(2)},card=1,kind=nan", tensor_parallel_size=2),
        "clean, two cards": guarded("all", tensor_parallel_size=2),
    }
    variables = SIM
    return run(tmp_path_factory.mktemp("guard"), jobs, variables)


def tokens(run: Run) -> list[list[int]]:
    """Returns the output tokens of a run, which must have succeeded."""
    assert "error" not in run.result, run.result["error"] + run.log[-4000:]
    require_backplane(run.result)
    return [output["token_ids"] for output in run.result["batches"][0]]


@pytest.mark.parametrize("name", ["clean", "clean, two cards"])
def test_a_clean_run_has_the_same_tokens(runs: dict[str, Run], tiny_llama: Path, name: str) -> None:
    reference.require_no_tie(tiny_llama, IDS, TOKENS)
    assert tokens(runs[name]) == tokens(runs["off"])
    assert re.search(r"Numeric guard: checks the inputs and outputs of \d\d modules", runs[name].log)
    assert "Numeric guard: copies between the host and device sim are checked" in runs[name].log
    assert "NumericFault" not in runs[name].log


def test_without_the_guard_the_same_fault_passes_unseen(runs: dict[str, Run]) -> None:
    """Tests that the injected fault raises no error by itself, so that the following tests depend on the guard."""
    assert tokens(runs["unseen"]) != tokens(runs["off"])


def test_a_nan_is_reported_with_its_module(runs: dict[str, Run]) -> None:
    assert "EngineDeadError" in runs["nan"].result["error"]
    report = runs["nan"].report()
    assert "rank 0 on card 0 of sim" in report
    assert "is that of model.layers.2.mlp.act_fn (" in report
    assert "): 3 NaN in its output (float32 [3, 256]" in report
    assert re.search(r"in 3 tokens, the first 0 and the last 2 of 3 \(requests 0\S*, 1\S*, 2\S*\)", report)
    assert re.search(r"Its inputs had no such values \(input\[0\] float32 \[3, 512\]: finite values from -", report)


def test_at_layers_the_layer_is_named(runs: dict[str, Run]) -> None:
    report = runs["nan, layers"].report()
    assert "is that of model.layers.1 (LlamaDecoderLayer)" in report
    assert "Its inputs had no such values" in report


def test_flipped_bits_are_reported_where_they_make_infinities(runs: dict[str, Run]) -> None:
    """Tests flipped exponent bits: of 64 values some are between 1 and 2, and become NaN or infinite."""
    assert "is that of model.layers.3.mlp.act_fn (" in runs["flipped"].report()


def test_a_corrupted_copy_is_reported_as_a_copy(runs: dict[str, Run]) -> None:
    assert "error" in runs["copy"].result
    assert re.search(r"card 0: copy 'copy_h2d' \(number \d+ .*bytes differ from their source", runs["copy"].log)
    assert "NumericFault" not in runs["copy"].log


def test_of_two_cards_the_one_at_fault_is_named(runs: dict[str, Run]) -> None:
    """Tests that the report names the card at fault.

    The other card gets NaN one module later, from the sum over both cards, and may report that.
    """
    assert "error" in runs["two cards"].result
    report = runs["two cards"].report()
    at_fault = re.search(r"rank 1 on card 1 of sim, step (\d+): .* that of model\.layers\.2\.mlp\.act_fn \(", report)
    assert at_fault, report
    other = re.search(r"rank 0 on card 0 of sim, step (\d+): .* that of model\.layers\.2\.mlp\.(\S+) \(", report)
    assert other is None or other.groups() == (at_fault[1], "down_proj"), report


def test_a_clean_run_on_the_cpu_has_the_same_tokens(cpu_runs: dict[str, Run]) -> None:
    assert tokens(cpu_runs["clean"]) == tokens(cpu_runs["off"])
    assert "Numeric guard: copies are not checked on device cpu" in cpu_runs["clean"].log


def test_a_bad_weight_is_distinguished_from_a_bad_kernel(cpu_runs: dict[str, Run]) -> None:
    report = cpu_runs["bad weight"].report()
    assert "rank 0 on card 0 of cpu, step 1: " in report
    assert "is that of model.layers.1.mlp.down_proj (" in report
    assert "its own parameters are bad: weight (1 values)" in report
