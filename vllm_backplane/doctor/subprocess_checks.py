"""Runs checks in a subprocess, and reports checks that raise, hang or end that process.

Importing torch, vLLM or a vendor's device may do all three. A check function reports the beginning and the end of each
check, so the check that ended the process is known by name. The function is then run again without that check, so one
broken part does not hide the others.
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
from vllm_patchbay.errors import PatchbayError

T = TypeVar("T")

CHECK_TIMEOUT = 120.0
"""Seconds without a report after which a check counts as hanging. Importing vLLM from a cold disk takes a while."""

CheckFunction = Callable[["CheckRunner", Mapping[str, Any]], None]

# The garbage collector is off: imports create no garbage, and collections would take a fifth of the time.
_CHILD = (
    "import gc, json, sys\n"
    "gc.disable()\n"
    "request = json.loads(sys.argv[1])\n"
    "sys.path[:] = request['path']\n"
    "from vllm_backplane.doctor import subprocess_checks\n"
    "subprocess_checks.run_child(request)\n"
)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Holds the result of one check, which is a value or a fault."""

    value: Any = None
    fault: str | None = None
    fatal: bool = False
    """Whether the check hung or ended the process, as it would in a process of vLLM."""


class CheckRunner:
    """Runs the checks of a check function in the subprocess, and reports their results to the parent."""

    def __init__(self, report: Callable[[dict[str, Any]], None], skip: Collection[str] = ()) -> None:
        self._report = report
        self._skip = frozenset(skip)

    def attempt(self, name: str, action: Callable[[], T], show: Callable[[T], Any] = lambda value: value) -> T | None:
        """Runs a check and reports `show(result)`. Returns None if the check fails or is skipped."""
        if name in self._skip:
            return None
        self._report({"begin": name})
        try:
            result = action()
            shown = show(result)
        except BaseException as fault:  # any exception, including SystemExit, is a result and must not end the process
            self._report({"end": name, "fault": describe(fault), "fatal": not isinstance(fault, Exception)})
            return None
        self._report({"end": name, "value": shown})
        return result


def describe(fault: BaseException) -> str:
    """Returns an exception as one line. Our own messages are written for users and need no type."""
    text = " ".join(str(fault).split())
    if isinstance(fault, (BackplaneError, PatchbayError)):
        return text
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__


def run(
    target: str,
    request: Mapping[str, Any],
    environment: Mapping[str, str] = os.environ,
    timeout: float = CHECK_TIMEOUT,
) -> dict[str, CheckResult]:
    """Runs the check function `target` ("module:function") with `request` in a subprocess, and returns all results.

    `timeout` is the limit in seconds for one check. The subprocess is started again without each check that hangs or
    ends it.
    """
    finished: dict[str, CheckResult] = {}
    fatal: dict[str, CheckResult] = {}
    while True:
        results, culprit = _run_once(target, {**request, "skip": list(fatal)}, environment, timeout)
        finished.update(results)
        if culprit is None:
            return {**finished, **fatal}
        name, fault = culprit
        again = name in fatal
        fatal[name] = CheckResult(fault=fault, fatal=True)
        if again or name.startswith(BETWEEN):  # skipping the check did not help, or there is nothing to skip
            return {**finished, **fatal}


BETWEEN = "between checks"
"""Prefix of the name under which a fault before the first check, or between two checks, is reported."""


def _run_once(
    target: str, request: Mapping[str, Any], environment: Mapping[str, str], timeout: float
) -> tuple[dict[str, CheckResult], tuple[str, str] | None]:
    """Returns the results, and the name and fault of the check that hung or ended the process, if any."""
    results: dict[str, CheckResult] = {}
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
        # Before the first report, Python starts and imports this module, to which the limit of a check does not apply.
        limit = max(timeout, CHECK_TIMEOUT)
        while not done:
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                hangs = True
                break
            if line is None:
                break
            limit = timeout
            record = json.loads(line)
            if "begin" in record:
                current = record["begin"]
            elif "end" in record:
                results[record["end"]] = CheckResult(
                    record.get("value"), record.get("fault"), record.get("fatal", False)
                )
                current = f"{BETWEEN}: after {record['end']}"
            else:
                done = True
        if hangs:
            os.killpg(child.pid, signal.SIGKILL)  # kills processes that it has started too
        status = child.wait()
        if done:
            return results, None
        if hangs:
            return results, (current, f"did not return within {limit:.0f} seconds")
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return results, (current, f"ended the process ({how}){_last_line(output)}")


def _read(descriptor: int, lines: queue.SimpleQueue[str | None]) -> None:
    with open(descriptor, encoding="utf-8") as reports:
        for line in reports:
            lines.put(line)
    lines.put(None)


def _last_line(output: Any) -> str:
    output.seek(0)
    printed = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    return f", last output: {printed[-1].strip()}" if printed else ""


def run_child(request: dict[str, Any]) -> None:
    """Runs the check function in the subprocess."""
    module, _, name = request["target"].partition(":")
    with open(request["report_to"], "w", encoding="utf-8") as reports:

        def report(record: dict[str, Any]) -> None:
            reports.write(json.dumps(record) + "\n")
            reports.flush()

        function: CheckFunction = getattr(importlib.import_module(module), name)
        function(CheckRunner(report, request["skip"]), request)
        report({"done": True})
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads and destructors of imported libraries may hang or crash at a normal exit, which is not checked here.
        os._exit(0)
