"""Tests what `vllm-backplane bench` concludes from its samples, without measuring anything."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from vllm_backplane.bench import measuring_process, other_load
from vllm_backplane.bench.other_load import OtherLoad
from vllm_backplane.bench.report import Report
from vllm_backplane.bench.samples import DECODE, PREFILL, Summary
from vllm_backplane.cli import main
from vllm_backplane.devices.cpu import CpuDevice
from vllm_backplane.errors import BackplaneError, UsageError

VERSIONS = {"vllm": "0.33.0"}


def measured(**changes: Any) -> dict[str, Any]:
    """Returns what the measuring process would return."""
    samples = {point.name: [{"first": 0.25, "prefill": 512.0}] * 2 for point in PREFILL}
    samples |= {
        point.name: [{"first": 0.1, "prefill": 1.0, "decode": rate} for rate in (40.0, 60.0)] for point in DECODE
    }
    worker = {"device": "cpu", "card": "Neoverse", "threads": 2, "weight_bytes_per_token": 100_000_000}
    return {
        "model": "tiny",
        "dtype": "float32",
        "quantization": "gguf",
        "max_model_len": 1088,
        "kv_cache_dtype": "auto",
        "workers": [worker],
        "samples": samples,
        "readings": [10e9, 8e9, 12e9],
        "other_load": (0.01, 0.0),
        "seconds_to_start": 10.0,
        "seconds": 50.0,
    } | changes


def test_the_share_is_that_of_the_medians():
    report = Report.of(measured(), VERSIONS)
    assert report.share == pytest.approx(50 * 0.1 / 10)
    figures = {figure.name: figure for figure in report.figures}
    assert figures["time to first token, prompt of 128"].summary == Summary(250.0, 250.0, 250.0, 2)
    assert figures["decode, 16 sequences"].cells() == ("decode, 16 sequences", "50.0", "40.0", "60.0", "tokens/s", "2")
    assert figures["memory, reading"].summary.median == 10
    assert report.heading() == "tiny (gguf weights, float32) on cpu: Neoverse, 2 threads\nvllm 0.33.0"
    assert report.remarks() == [
        "100.0 MB of weights are read per token: decode of one sequence reaches 50% of the measured bandwidth",
        "meanwhile, other programs took 1% of the processor time, and steal 0%",
    ]


@pytest.mark.parametrize(
    ("changes", "reason", "reliable"),
    [
        ({"other_load": (0.3, 0.0)}, "the machine was busy", False),
        ({"other_load": (0.0, 0.1)}, "the machine was busy", False),
        ({"readings": []}, "Device.read_memory", True),
        ({"samples": {}}, "decode was not measured", True),
    ],
)
def test_no_share_is_stated_where_it_would_mean_nothing(changes, reason, reliable):
    report = Report.of(measured(**changes), VERSIONS)
    found = report.as_json()
    assert found["share_of_bandwidth"] is None
    assert reason in found["no_share"]
    assert found["reliable"] is reliable
    assert any("NOT RELIABLE" in line for line in report.remarks()) is not reliable


def test_points_that_do_not_fit_are_named():
    samples = measured()["samples"]
    del samples["prefill, prompt of 1024"]
    report = Report.of(measured(samples=samples, max_model_len=256), VERSIONS)
    assert report.remarks()[0] == (
        "prefill, prompt of 1024: not measured, 1025 tokens do not fit in the context of 256"
    )


def test_several_workers_add_up():
    worker = measured()["workers"][0]
    report = Report.of(measured(workers=[worker, worker], other_load=None), VERSIONS)
    assert (report.threads, report.weight_bytes_per_token) == (4, 200_000_000)
    assert "4 threads, 2 workers" in report.heading()
    assert "does not count" in report.remarks()[1]
    accelerator = Report.of(measured(workers=[worker | {"threads": None}]), VERSIONS)
    assert accelerator.threads is None
    assert "thread" not in accelerator.heading()


def test_the_load_of_others_is_what_this_process_did_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(other_load, "STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    own = {"user": 1.0}
    process = SimpleNamespace(cpu_times=lambda: SimpleNamespace(system=0.0, **own), children=lambda recursive: [])
    monkeypatch.setattr(psutil, "Process", lambda: process)
    tick = os.sysconf("SC_CLK_TCK")
    line = "cpu{} {} 0 0 {} 0 0 0 {} 0 0\n"
    stat.write_text("cpu 9 9 9 9 9 9 9 9 9 9\n" + "".join(line.format(cpu, 0, 0, 0) for cpu in range(3)))
    load = OtherLoad()
    # Ten seconds: two cores of this process, and a third one.
    stat.write_text("".join(line.format(cpu, 5 * tick, 4 * tick, tick) for cpu in range(3)))
    own["user"] = 9.0
    assert load.shares() == pytest.approx((0.1, 0.1))
    stat.unlink()
    assert OtherLoad().shares() is None


def test_the_cpu_device_reads_every_part_of_its_memory():
    assert CpuDevice().read_memory(torch.ones(1 << 20, dtype=torch.uint8))
    assert CpuDevice().read_memory(torch.ones(65, dtype=torch.uint8))


@pytest.mark.parametrize(
    "argument",
    [
        *("-pp", "--data_parallel_size=2", "--speculative-config", "--config", "--speculative-config.method=ngram"),
        *("--spec-method", "--max_num_seqs=4", "--enable-prefix-caching"),
    ],
)
def test_what_would_change_the_meaning_is_refused(capsys, argument):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "smollm2", argument])
    assert ended.value.code == 2
    assert "is not supported by this command" in capsys.readouterr().err


def config(*, pipeline: int = 1, data: int = 1, speculative: object = None) -> SimpleNamespace:
    parallel = SimpleNamespace(pipeline_parallel_size=pipeline, data_parallel_size=data)
    return SimpleNamespace(parallel_config=parallel, speculative_config=speculative)


def test_what_would_change_the_meaning_is_refused_however_it_was_given():
    measuring_process.require_counted_weights(config())
    for changed, what in (
        (config(pipeline=2), "pipeline parallelism"),
        (config(data=2), "data parallelism"),
        (config(speculative=object()), "speculative decoding"),
    ):
        with pytest.raises(UsageError, match=f"^{what} is not supported"):
            measuring_process.require_counted_weights(changed)


@pytest.mark.parametrize("argument", ["--quantisation", "--spec-m", "--pipeline-parallel=2", "--max-model-len=x"])
def test_a_mistyped_or_abbreviated_option_is_named(argument):
    with pytest.raises(UsageError, match=argument.partition("=")[0]) as raised:
        measuring_process.parsed(["--model", "m", argument])
    assert "\n" not in str(raised.value)


def test_an_unknown_option_comes_with_the_remedy():
    with pytest.raises(UsageError, match=r"unrecognized arguments: --nonsense.*'vllm serve --help=all' lists"):
        measuring_process.parsed(["--model", "m", "--nonsense"])


def test_a_longer_context_than_is_measured_is_refused(tmp_path):
    assert measuring_process.parsed(["--model", str(tmp_path), "--max-model-len", "512"]).max_model_len == 512
    with pytest.raises(UsageError, match="--max-model-len: at most 1025 tokens are measured"):
        measuring_process.parsed(["--model", str(tmp_path), "--max-model-len", "4k"])


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provides the arguments of a measuring process, and restores the handler of signals that it installs."""
    (tmp_path / "plan").write_text(json.dumps({"arguments": [], "seconds": 1, "result": str(tmp_path / "result")}))
    monkeypatch.setattr(sys, "argv", ["", "1", str(tmp_path / "plan")])
    monkeypatch.setattr(measuring_process, "end_with_owner", lambda _owner: None)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("fault", "status"), [(UsageError("no such option"), 2), (BackplaneError("no memory"), 1)])
def test_the_process_states_why_it_ends(plan, monkeypatch, capsys, fault, status):
    def fails(*_arguments: Any) -> None:
        raise fault

    monkeypatch.setattr(measuring_process, "measure", fails)
    with pytest.raises(SystemExit) as ended:
        measuring_process.main()
    assert ended.value.code == status
    assert capsys.readouterr().out == f"vllm-backplane: error: {fault}\n"


def test_a_signal_lets_the_exit_handlers_run(plan, monkeypatch):
    monkeypatch.setattr(measuring_process, "measure", lambda *_arguments: os.kill(os.getpid(), signal.SIGTERM))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # if the process installs no handler
    with pytest.raises(SystemExit) as ended:
        measuring_process.main()
    assert ended.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize("seconds", ["0", "-1", "x", "nan", "1e9"])
def test_the_time_is_a_positive_number(capsys, seconds):
    with pytest.raises(SystemExit) as ended:
        main(["bench", f"--seconds={seconds}"])
    assert ended.value.code == 2
    assert "is not a number of seconds" in capsys.readouterr().err
