"""Serve a model with the OpenAI API.

MODEL is a bundled name (see 'vllm-backplane model list'), a folder, or anything else that 'vllm serve'
takes; without one, the default model is prepared and served. Every argument that is not listed below goes to
'vllm serve', after MODEL:

  vllm-backplane serve smollm2 --port 8001 --max-model-len 2048

With --config and no MODEL, the configuration file names the model.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import FrameType
from typing import NoReturn

from vllm_backplane.cli import _output
from vllm_backplane.errors import BackplaneError
from vllm_backplane.models import DEFAULT, models, obtain

NAME = "serve"
HELP = "serve a model with the OpenAI API"
PASSES_ON = True

DEVICE_VARIABLE = "BACKPLANE_DEVICE"
LONGEST_BASE = 107 - len("/vllm-12345678/01234567-89ab-cdef-0123-456789abcdef")
"""Of a folder for sockets: the name of one has room for 107 bytes."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What this process goes on as."""

    command: list[str]
    variables: dict[str, str]
    """Set on top of the environment."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [--device NAME] [--host HOST] [--port PORT] [vllm serve arguments ...]"
    parser.add_argument("--device", metavar="NAME", help=f"the device to run on; sets {DEVICE_VARIABLE}")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--dry-run", action="store_true", help="print vLLM's command and the variables instead of running it"
    )
    _output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    if args.json and not args.dry_run:
        raise BackplaneError("--json shapes what --dry-run prints; add --dry-run or remove it")
    if find_spec("vllm") is None:
        raise BackplaneError(f"{sys.executable} has no vLLM; install it, or run 'make setup' in the repository")
    refuse_lockout(os.environ)
    launch = plan(args, os.environ)
    if args.dry_run:
        if args.json:
            _output.print_json({"command": launch.command, "variables": launch.variables})
        else:
            variables = [f"{name}={shlex.quote(value)}" for name, value in launch.variables.items()]
            print(" ".join([*variables, shlex.join(launch.command)]))
        return 0
    os.environ.update(launch.variables)
    become(launch)


def become(launch: Launch) -> NoReturn:
    """vLLM's serve command in this process.

    That saves the start of another process and the import of vLLM's other commands, keeps the current folder off the
    path, and works where vLLM's distribution has another name than 'vllm', which its own command line insists on.
    """
    # Nothing that is imported becomes garbage, and the collector would look for some again and again.
    gc.disable()
    from vllm.entrypoints.cli import serve as vllm_serve
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_backplane.settings import compat

    gc.freeze()
    gc.enable()
    cli_env_setup()
    keep_sockets_together()
    sys.argv = launch.command
    parser = FlexibleArgumentParser(prog="vllm")
    subparsers = parser.add_subparsers(required=True, dest="subparser")
    (command,) = vllm_serve.cmd_init()
    command.subparser_init(subparsers)
    args = parser.parse_args()
    compat.configure_logging(args)
    command.validate(args)
    signal.signal(signal.SIGINT, interrupt)
    try:
        command.cmd(args)
    except Interrupted:
        for process in multiprocessing.active_children():  # vLLM may have been interrupted before it knew of them
            process.kill()
        leave(Interrupted.STATUS)
    except SystemExit as end:  # because the engine died: whoever is to start another waits
        leave(end.code)
    except BaseException:
        gc.unfreeze()  # what is frozen outlives the interpreter, and libraries complain of that
        raise
    leave(0)


class Interrupted(SystemExit):
    """By Ctrl-C, before the server was up."""

    STATUS = 128 + signal.SIGINT


def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    """A server that is up handles Ctrl-C otherwise. Until then, asyncio would put off what Python's own handler does
    to when the engine is ready, minutes later for a large model. A KeyboardInterrupt at once would be lost: vLLM's
    `zmq_socket_ctx` keeps it to itself, and waits on for an engine that it can no longer talk to."""
    raise Interrupted(Interrupted.STATUS)


def keep_sockets_together() -> None:
    """vLLM's processes talk through sockets that are files, in the folder for temporary ones, and which of them remain
    there depends on how each process ended. In a folder of their own they go together."""
    base = os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir()
    if not os.path.isdir(base):
        raise BackplaneError(f"VLLM_RPC_BASE_PATH names {base}, which is no folder; create it, or unset the variable")
    if len(os.fsencode(base)) > LONGEST_BASE:
        return  # where vLLM's own names just fit, they are left as they are
    folder = os.environ["VLLM_RPC_BASE_PATH"] = tempfile.mkdtemp(prefix="vllm-", dir=base)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def leave(status: int | str | None) -> NoReturn:
    """End without taking the interpreter apart: what vLLM has imported takes seconds to destroy, object by object, and
    whoever pressed Ctrl-C waits for them. What has to happen at an exit is registered for it, and happens. `status` is
    what sys.exit takes: a text is told, and is a failure."""
    if isinstance(status, str):
        print(status, file=sys.stderr)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if isinstance(status, str) else status or 0)


def refuse_lockout(environment: Mapping[str, str]) -> None:
    """vLLM can be told to ignore this plugin, and then runs another platform or none without a word."""
    from vllm_backplane.doctor import plugins

    for finding in plugins.check_environment(plugins.find(), environment):
        if finding.severity == "error":
            raise BackplaneError(f"{finding.what}; {finding.remedy}")


def plan(args: argparse.Namespace, environment: Mapping[str, str]) -> Launch:
    variables = {}
    if args.device:
        stated = environment.get(DEVICE_VARIABLE, "")
        if stated and stated != args.device:
            raise BackplaneError(f"--device says {args.device!r} and {DEVICE_VARIABLE} says {stated!r}: remove one")
        variables[DEVICE_VARIABLE] = args.device
    rest = list(args.rest)
    given = rest.pop(0) if rest and not rest[0].startswith("-") else None
    if _has(rest, "--model"):
        raise BackplaneError("name the model as the first argument instead of with --model")
    model = [] if given is None and _has(rest, "--config") else _model_arguments(given or DEFAULT.name, rest)
    command = ["vllm", "serve", *model, "--host", args.host, "--port", str(args.port), *rest]
    return Launch(command, variables)


def _model_arguments(given: str, rest: list[str]) -> list[str]:
    for model in models():
        if model.name == given:
            # A folder of the same name would be meant by './NAME'.
            name = [] if _has(rest, "--served-model-name") else ["--served-model-name", model.served_name]
            dtype = [] if _has(rest, "--dtype") else ["--dtype", model.dtype]
            # What a disk or a user did to a file that keeps its size would be served: a tenth of a second for 100 MB.
            return [str(obtain(given, _output.progress, verify=True)), *name, *dtype]
    return [given]


def _has(arguments: list[str], option: str) -> bool:
    # vLLM takes underscores for hyphens.
    spelled = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    return option in spelled


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port number (1 to 65535)")
    return int(text)
