"""Builds the environment of one vLLM release and runs one command per step in it. Needs only the standard library."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from vllm_backplane.settings.releases import Release  # noqa: E402

BUILD = "environment"
SMOKE = ("chat", "batch", "embeddings", "features-cpu", "features-sim")
UNIT = (
    *("binding", "config", "distributed", "early_checks", "io_processors", "kv_offload", "layers", "lora"),
    *("metrics", "page", "patches"),
    *(
        "process",
        "quantization",
        "runner",
        "settings",
        "weights",
        "worker",
        "devices/test_cpu_threads.py",
        "test_general_plugin.py",
        "test_platform_choice.py",
        "test_runtime.py",
    ),
)
"""Folders and files of unit tests that import vLLM."""
STATIC = "versions/test_versions_static.py"
"""Tests that read the source of each release. Those of the installed one run."""
FAST = "not (exhaustive or slow or compiler or download or models or server)"
STEPS = (BUILD, "doctor", "patches", "static", "unit", *SMOKE)
PROCESSES = 2
"""Processes that run unit tests."""
VARIABLES = {"unit": {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // PROCESSES))}}
"""Variables of a step. More threads than cores would wait for each other in every operator."""
LIMIT_SECONDS = 1800
"""Time after which a step counts as hanging."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds the result of one step with one release."""

    version: str
    step: str
    status: str
    """'ok', 'failed' or 'not run'."""
    seconds: float
    log: str

    @property
    def failed(self) -> bool:
        return self.status != "ok"


def environment_of(release: Release) -> Path:
    return ROOT / f".venv-matrix-{release.version}"


def command(release: Release, step: str, folder: Path) -> list[str]:
    venv = environment_of(release)
    if step == BUILD:
        variables = [f"VENV={venv.name}", f"VLLM_VERSION={release.version}", f"TORCH_VERSION={release.torch}"]
        return ["make", "-C", str(ROOT), "matrix-environment", f"PYTHON={sys.executable}", *variables]
    if step in SMOKE:
        return [str(venv / "bin/python"), str(Path(__file__).with_name("smoke.py")), step, str(folder)]
    tests = ROOT / "tests" / "unit"
    pytest = [str(venv / "bin/python"), "-m", "pytest", "-q"]
    if step == "static":
        return [*pytest, str(tests / STATIC), "-k", f"[{release.version}]"]
    if step == "unit":
        in_parallel = ["-n", str(PROCESSES), "--dist", "loadfile"]
        return [*pytest, *in_parallel, *(str(tests / name) for name in UNIT), "-m", FAST]
    arguments = {"doctor": ["doctor", "--full"], "patches": ["patches", "check"]}[step]
    return [str(venv / "bin/vllm-backplane"), *arguments]


def run(release: Release, report: Callable[[str], None]) -> Iterator[Outcome]:
    """Runs the steps in order. If the environment cannot be built, the other steps are not run."""
    logs = environment_of(release) / ".backplane" / "logs"
    built = True
    for step in STEPS:
        log = logs / f"{step}.log"
        if not built:
            yield Outcome(release.version, step, "not run", 0.0, "")
            continue
        report(f"{release.version} {step}")
        folder = logs / step
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
        folder.mkdir(parents=True)
        began = time.monotonic()
        # The build takes minutes, so its output is reported line by line.
        report_line = report if step == BUILD else None
        status = _run_logged(command(release, step, folder), log, report_line, VARIABLES.get(step, {}))
        outcome = Outcome(
            release.version, step, "failed" if status else "ok", time.monotonic() - began, str(log.relative_to(ROOT))
        )
        if outcome.failed:
            report(f"{release.version} {step} failed with status {status}; the end of {outcome.log}:")
            for line in log.read_text(errors="replace").splitlines()[-40:]:
                report(f"  {line}")
        built = built and not (step == BUILD and outcome.failed)
        yield outcome


def _run_logged(arguments: list[str], log: Path, report: Callable[[str], None] | None, more: Mapping[str, str]) -> int:
    """Runs a command, writes its output to `log`, reports it line by line, and returns the exit status.

    All processes of the command have ended when this returns.
    """
    # These variables of the caller would make the step use another Python or another vLLM.
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "VLLM_VERSION", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    process = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**variables, **more, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
        cwd=log.parent,  # in the repository, Python would import from its folders
        start_new_session=True,
    )
    guard = threading.Timer(LIMIT_SECONDS, _end, [process])
    guard.start()
    try:
        assert process.stdout is not None
        with log.open("w") as output:
            for line in process.stdout:
                output.write(line)
                output.flush()
                if report is not None and line.strip():
                    report(f"  {line.rstrip()}")
        return process.wait()
    finally:
        guard.cancel()
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupts the process group as Ctrl-C does, so that a step ends its servers, and kills it after a minute."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(60)
