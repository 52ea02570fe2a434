"""What is done for one release of vLLM: build its environment, then one command per step. Needs nothing but Python."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from vllm_backplane.settings.releases import Release  # noqa: E402

BUILD = "environment"
SMOKE = ("chat", "batch", "embeddings")
STEPS = (BUILD, "doctor", "patches", *SMOKE)
LIMIT_SECONDS = 1800
"""A guard against a step that hangs, not a measurement."""


@dataclass(frozen=True, slots=True)
class Outcome:
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
        stated = [f"VENV={venv.name}", f"VLLM_VERSION={release.version}", f"TORCH_VERSION={release.torch}"]
        return ["make", "-C", str(ROOT), "runtime", f"PYTHON={sys.executable}", *stated]
    if step in SMOKE:
        return [str(venv / "bin/python"), str(Path(__file__).with_name("smoke.py")), step, str(folder)]
    arguments = {"doctor": ["doctor"], "patches": ["patches", "check"]}[step]
    return [str(venv / "bin/vllm-backplane"), *arguments]


def run(release: Release, tell: Callable[[str], None]) -> Iterator[Outcome]:
    """Every step, in order; those that need the environment are not run without it."""
    logs = environment_of(release) / ".backplane" / "logs"
    built = True
    for step in STEPS:
        log = logs / f"{step}.log"
        if not built:
            yield Outcome(release.version, step, "not run", 0.0, "")
            continue
        tell(f"{release.version} {step}")
        folder = logs / step
        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        # The building takes minutes and says what it does.
        status = _followed(command(release, step, folder), log, tell if step == BUILD else None)
        outcome = Outcome(
            release.version, step, "failed" if status else "ok", time.monotonic() - began, str(log.relative_to(ROOT))
        )
        if outcome.failed:
            tell(f"{release.version} {step} failed with status {status}; the end of {outcome.log}:")
            for line in log.read_text(errors="replace").splitlines()[-40:]:
                tell(f"  {line}")
        built = built and not (step == BUILD and outcome.failed)
        yield outcome


def _followed(arguments: list[str], log: Path, tell: Callable[[str], None] | None) -> int:
    """Run a command with its output in `log`, and line by line to `tell`. Nothing of it is left when this returns."""
    # Of the caller's environment, what would lead the step to another Python or another vLLM is left out.
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "VLLM_VERSION", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS")
    variables = {name: value for name, value in os.environ.items() if name not in left_out}
    process = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**variables, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
        cwd=log.parent,  # not the repository, whose folders Python would import from
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
                if tell is not None and line.strip():
                    tell(f"  {line.rstrip()}")
        return process.wait()
    finally:
        guard.cancel()
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """As Ctrl-C does, so that a step ends the servers it started; by force if that does not help."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(60)
