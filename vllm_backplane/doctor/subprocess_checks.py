"""Runs checks in a process of their own, one step after the other, and survives what they do.

Importing torch, vLLM or a vendor's device runs code that may raise, hang or end the process. A stage is a function
that reports each step when it begins and when it ends, so the step that took the process down is known by name. The
stage is then run again without that step: one broken part hides nothing else.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm_backplane.errors import BackplaneError

T = TypeVar("T")

STEP_LIMIT = 120.0
"""Seconds without a report after which a step counts as hanging. Importing vLLM from a cold disk takes a while."""

Stage = Callable[["Steps", Mapping[str, Any]], None]

# Without the collector: nothing that is imported becomes garbage, and looking for it is a fifth of the time.
_CHILD = (
    "import gc, json, sys\n"
    "gc.disable()\n"
    "request = json.loads(sys.argv[1])\n"
    "sys.path[:] = request['path']\n"
    "from vllm_backplane.doctor import subprocess_checks as stage\n"
    "stage.serve(request)\n"
)


@dataclass(frozen=True, slots=True)
class Step:
    """How one step ended: with a value, or with a fault."""

    value: Any = None
    fault: str | None = None
    fatal: bool = False
    """The fault was no ordinary exception: it hung, or ended the process, as it would have done to vLLM's."""


class Steps:
    """Given to a stage, in its process."""

    def __init__(self, report: Callable[[dict[str, Any]], None], skip: Collection[str] = ()) -> None:
        self._report = report
        self._skip = frozenset(skip)

    def attempt(self, name: str, action: Callable[[], T], show: Callable[[T], Any] = lambda value: value) -> T | None:
        """Run a step and report `show` of its result; None if it failed or is to be left out."""
        if name in self._skip:
            return None
        self._report({"begin": name})
        try:
            result = action()
            shown = show(result)
        except BaseException as fault:  # anything, sys.exit() included, is a finding and must not end the stage
            self._report({"end": name, "fault": describe(fault), "fatal": not isinstance(fault, Exception)})
            return None
        self._report({"end": name, "value": shown})
        return result


def describe(fault: BaseException) -> str:
    """An exception in one line; ours are written for users and need no type."""
    text = " ".join(str(fault).split())
    if isinstance(fault, BackplaneError):
        return text
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__


def run(
    target: str,
    request: Mapping[str, Any],
    environment: Mapping[str, str] = os.environ,
    step_limit: float = STEP_LIMIT,
) -> dict[str, Step]:
    """The steps of the stage `target` ("module:function"), in order, run with `request` in a new process."""
    finished: dict[str, Step] = {}
    fatal: dict[str, Step] = {}
    while True:
        seen, culprit = _run_once(target, {**request, "skip": list(fatal)}, environment, step_limit)
        finished.update(seen)
        if culprit is None:
            return {**finished, **fatal}
        name, fault = culprit
        again = name in fatal
        fatal[name] = Step(fault=fault, fatal=True)
        if again or name.startswith(BETWEEN):  # leaving it out does not help
            return {**finished, **fatal}


BETWEEN = "between steps"
"""Begins the name of what is no step: the way to the first one, or from one to the next."""


def _run_once(
    target: str, request: Mapping[str, Any], environment: Mapping[str, str], step_limit: float
) -> tuple[dict[str, Step], tuple[str, str] | None]:
    steps: dict[str, Step] = {}
    current, done, hangs = f"{BETWEEN}: start", False, False
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as output:
        child_request = {**request, "target": target, "report_to": writing, "path": sys.path}
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, json.dumps(child_request)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            pass_fds=(writing,),
            start_new_session=True,
        )
        os.close(writing)
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(reading, lines), daemon=True).start()
        # Until the first report Python starts and imports this; however short a step may be, that is none.
        limit = max(step_limit, STEP_LIMIT)
        while not done:
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                hangs = True
                break
            if line is None:
                break
            limit = step_limit
            record = json.loads(line)
            if "begin" in record:
                current = record["begin"]
            elif "end" in record:
                steps[record["end"]] = Step(record.get("value"), record.get("fault"), record.get("fatal", False))
                current = f"{BETWEEN}: after {record['end']}"
            else:
                done = True
        if hangs:
            os.killpg(child.pid, signal.SIGKILL)  # with the processes it may have started
        status = child.wait()
        if done:
            return steps, None
        if hangs:
            return steps, (current, f"did not come back within {limit:.0f} seconds")
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return steps, (current, f"ended the process ({how}){_last_line(output)}")


def _read(descriptor: int, lines: queue.SimpleQueue[str | None]) -> None:
    with open(descriptor, encoding="utf-8") as reports:
        for line in reports:
            lines.put(line)
    lines.put(None)


def _last_line(output: Any) -> str:
    output.seek(0)
    printed = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    return f", saying: {printed[-1].strip()}" if printed else ""


def serve(request: dict[str, Any]) -> None:
    """The child's side."""
    module, _, name = request["target"].partition(":")
    with open(request["report_to"], "w", encoding="utf-8") as reports:

        def report(record: dict[str, Any]) -> None:
            reports.write(json.dumps(record) + "\n")
            reports.flush()

        stage: Stage = getattr(importlib.import_module(module), name)
        stage(Steps(report, request["skip"]), request)
        report({"done": True})
        sys.stdout.flush()
        sys.stderr.flush()
        # Not through the interpreter's end: threads and destructors of what was imported are nobody's business here.
        os._exit(0)
