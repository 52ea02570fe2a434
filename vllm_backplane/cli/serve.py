"""Serve a model with the OpenAI API.

MODEL is the name of a bundled or an added model (see 'vllm-backplane model list'), a GGUF file on a hub
(user/repository:Q4_K_M, which is added first), a path, or anything else that 'vllm serve' accepts. Without MODEL, the
default model is prepared and served. Every argument that is not listed below is passed on to 'vllm serve'
and must follow MODEL:

  vllm-backplane serve smollm2 --port 8001 --max-model-len 2048

With --config and without MODEL, the configuration file must name the model.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NoReturn

from vllm_backplane.added_models import lookup
from vllm_backplane.added_models import names as added_names
from vllm_backplane.added_models.serving import is_served_by_name, path_to_serve
from vllm_backplane.cli import _interrupts, _mistakes, _output
from vllm_backplane.early_checks import check_serve_command
from vllm_backplane.errors import BackplaneError, UsageError
from vllm_backplane.guards import guarded, verify_guards
from vllm_backplane.host.control_groups import control_group_limits
from vllm_backplane.models import DEFAULT, models, obtain
from vllm_backplane.page.loading import OPTION, arguments_of_serve, refuse_named_page
from vllm_backplane.platform_choice import COMMAND_VARIABLE, DEVICE_VARIABLE, PLUGINS_VARIABLE, active_plugin
from vllm_backplane.process import start_events
from vllm_backplane.process.fast_exit import exit_without_teardown
from vllm_backplane.settings.vllm_messages import parser_class
from vllm_backplane.start_display import session

NAME = "serve"
HELP = "serve a model with the OpenAI API"
PASSES_ON = True

MIN_ADDRESS_SPACE = 3 << 30
"""Bytes of address space with which a server of a tiny model starts."""
MIN_MEMORY = 1 << 30
"""Bytes of memory without which no server starts: libraries take 0.7 GiB, and the `cpu` device leaves the host 0.5."""
MAX_BASE_LENGTH = 107 - len("/vllm-12345678/01234567-89ab-cdef-0123-456789abcdef")
"""Longest path of a folder for sockets: the path of a Unix socket has at most 107 bytes."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Holds the command line of vLLM that this process continues with."""

    command: list[str]
    variables: dict[str, str]
    """Environment variables that are set in addition."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [--device NAME] [--host HOST] [--port PORT] [vllm serve arguments ...]"
    parser.add_argument("--device", metavar="NAME", help=f"the device to run on; sets {DEVICE_VARIABLE}")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8000, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--verbose", action="store_true", help="write vLLM's log to the terminal instead of a file, and all of it"
    )
    parser.add_argument(
        OPTION, action="store_true", help="serve no page: chat with the model, and status, at / in a browser"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print vLLM's command line and environment variables, and exit"
    )
    _output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    if args.json and not args.dry_run:
        raise UsageError("--json applies only to the output of --dry-run; add --dry-run or remove --json")
    if find_spec("vllm") is None:
        raise BackplaneError(
            f"vLLM is not installed for {sys.executable}; install it, or run 'make setup' in the repository"
        )
    refuse_disabled_plugin(os.environ)
    refuse_other_platform(os.environ)
    if args.no_page:
        refuse_named_page(os.environ)
    if not args.dry_run:
        require_address_space()
        require_memory_of_control_group()
        check_mistakes(args, os.environ)
    launch = plan(args, os.environ)
    if args.dry_run:
        if args.json:
            _output.print_json({"command": launch.command, "variables": launch.variables})
        else:
            variables = [f"{name}={shlex.quote(value)}" for name, value in launch.variables.items()]
            print(" ".join([*variables, shlex.join(launch.command)]))
        return 0
    os.environ.update(launch.variables)
    custom = _has(launch.command, "--log-config-file") or bool(os.environ.get("VLLM_LOGGING_CONFIG_PATH"))
    session.begin(verbose=args.verbose, custom_logging=custom)
    run_vllm(launch)


def check_mistakes(args: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Raises `UsageError` for the first mistake that is found without vLLM, and before a model is prepared."""
    model, rest = _split(args.rest)
    if model is None and not _has(rest, "--config"):
        model = DEFAULT.name
    prepared = [*(each.name for each in models()), *added_names()]
    if model is not None and is_served_by_name(model):
        prepared.append(model)  # the name that it has on a hub
    added = lookup(model) if model is not None else None
    check_serve_command(
        model,
        rest,
        prepared=prepared,
        address=(args.host, args.port),
        device=args.device,
        environment=environment,
        files=None if added is None else added.path,
    )


def require_address_space() -> None:
    """Raises if a limit of this process is too low for vLLM itself. Imports would fail at some place, or threads."""
    for number, name in ((resource.RLIMIT_AS, "ulimit -v"), (resource.RLIMIT_DATA, "ulimit -d")):
        limit, _ = resource.getrlimit(number)
        if limit != resource.RLIM_INFINITY and limit < MIN_ADDRESS_SPACE:
            raise BackplaneError(
                f"{name} limits each process to {limit / (1 << 30):.2f} GiB, and a server needs "
                f"{MIN_ADDRESS_SPACE >> 30} GiB besides weights and KV cache, most of which it never uses; raise the "
                "limit, or limit the memory with a control group"
            )


def require_memory_of_control_group() -> None:
    """Raises if a control group of this process is too small for vLLM. The kernel would kill it in its imports."""
    smallest = min((limit for limit, _ in control_group_limits()), default=MIN_MEMORY)
    if smallest < MIN_MEMORY:
        raise BackplaneError(
            f"a control group (of a container, a service or a job) limits the memory of this process to "
            f"{smallest / (1 << 30):.2f} GiB, and a server needs {MIN_MEMORY >> 30} GiB besides weights and KV cache; "
            "raise the limit"
        )


def run_vllm(launch: Launch) -> NoReturn:
    """Runs vLLM's serve command in this process.

    This saves the start of another process and the import of vLLM's other commands, and keeps the current folder off
    the import path. It also works where vLLM's distribution is not named 'vllm', which vLLM's own command requires.
    """
    _interrupts.end_silently()
    # Imports create no garbage, and collections during the imports would only take time.
    gc.disable()
    from vllm.entrypoints.cli import serve as vllm_serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_backplane.config import chat_template
    from vllm_backplane.process import start_signals
    from vllm_backplane.settings import compat

    gc.freeze()
    gc.enable()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, start_signals.interrupt)
    start_events.report("imports", vllm=compat.vllm_version())
    compat.set_up_environment()
    use_own_socket_folder()
    sys.argv = launch.command
    parser = parser_class(FlexibleArgumentParser)(prog="vllm")
    subparsers = parser.add_subparsers(required=True, dest="subparser")
    (command,) = vllm_serve.cmd_init()
    command.subparser_init(subparsers)
    try:
        with _mistakes.in_arguments():
            args = parser.parse_args()
            session.check_mode(args)
            compat.configure_logging(args)
            command.validate(args)
            chat_template.set_command_line(*compat.chat_template_of(args))
        verify_guards()  # of this process: with spawned workers, some of its modules are in no other one
        command.cmd(args)
    except KeyboardInterrupt:  # vLLM's handler of SIGTERM raised it, before the engine's configuration was made
        exit_without_teardown(128 + signal.SIGTERM)
    except SystemExit as end:  # a signal came, or the engine died; exit fast, because a supervisor waits to restart it
        exit_without_teardown(_status_of_signal(end) if end.code is None else end.code)
    except UsageError as mistake:
        exit_without_teardown(_output.report_error(mistake))
    except BaseException as fault:
        if (refusal := _mistakes.mistake_behind(fault)) is not None:
            exit_without_teardown(_output.report_error(refusal))
        gc.unfreeze()  # frozen objects outlive the interpreter, and some libraries then print errors
        raise
    exit_without_teardown(0)


@guarded("vllm.entrypoints.cli.serve:run_headless", why="the number of a signal is read from its signal handler")
def _status_of_signal(end: SystemExit) -> int:
    """Returns the exit status of the signal whose handler raised `end` without a status: vLLM's, with --headless. Code
    that is no handler of a signal means status 0 by that."""
    *_, (frame, _line) = traceback.walk_tb(end.__traceback__)
    number = frame.f_locals.get("signum")
    return 128 + number if isinstance(number, int) else 0


def use_own_socket_folder() -> None:
    """Makes vLLM create its sockets in a folder of their own, which is removed at exit.

    vLLM's processes communicate through Unix sockets, files among the temporary files. Which of the files are removed
    depends on how each process ends.
    """
    base = os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir()
    if not os.path.isdir(base):
        raise UsageError(
            f"VLLM_RPC_BASE_PATH is {base}, which is not a folder; create the folder or unset the variable"
        )
    if len(os.fsencode(base)) > MAX_BASE_LENGTH:
        return  # vLLM's own paths may still fit where a longer path does not
    folder = os.environ["VLLM_RPC_BASE_PATH"] = tempfile.mkdtemp(prefix="vllm-", dir=base)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def refuse_disabled_plugin(environment: Mapping[str, str]) -> None:
    """Raises `BackplaneError` if environment variables make vLLM ignore this plugin.

    vLLM would then silently use another platform, or none.
    """
    from vllm_backplane.doctor import plugins

    for finding in plugins.check_environment(plugins.find(), environment):
        if finding.severity == "error":
            raise UsageError(f"{finding.what}; {finding.remedy}")


def refuse_other_platform(environment: Mapping[str, str]) -> None:
    """Raises `BackplaneError` if a platform plugin of another distribution is active: vLLM accepts one platform."""
    from vllm_backplane.doctor import plugins

    if (other := active_plugin(environment)) is None:
        return
    allowed = plugins.allowed_names(environment)
    found = {plugin.name for plugin in plugins.find() if plugins.is_allowed(plugin, allowed)}
    names = ",".join(sorted(found - {other.name}))
    raise BackplaneError(
        f"the platform plugin {other.name!r} of {other.distribution} is active too, and vLLM accepts one platform; set "
        f"{PLUGINS_VARIABLE}={names}, or uninstall {other.distribution}"
    )


def plan(args: argparse.Namespace, environment: Mapping[str, str]) -> Launch:
    """Returns the command line of vLLM for the arguments; prepares a bundled model if needed."""
    variables = {} if environment.get(DEVICE_VARIABLE) or args.device else {COMMAND_VARIABLE: NAME}
    if args.device:
        configured = environment.get(DEVICE_VARIABLE, "")
        if configured and configured != args.device:
            raise UsageError(f"--device is {args.device!r} and {DEVICE_VARIABLE} is {configured!r}; remove one of them")
        variables[DEVICE_VARIABLE] = args.device
    given, rest = _split(args.rest)
    model = [] if given is None and _has(rest, "--config") else _model_arguments(given or DEFAULT.name, rest)
    page = arguments_of_serve(environment, wanted=not args.no_page)
    command = ["vllm", "serve", *model, "--host", args.host, "--port", str(args.port), *page, *rest]
    return Launch(command, variables)


def _split(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Returns the model, if one is given, and the arguments of vLLM."""
    is_given = bool(arguments) and not arguments[0].startswith("-")
    rest = list(arguments[1:] if is_given else arguments)
    if _has(rest, "--model"):
        raise UsageError("--model is not supported; give the model as the first argument")
    return (arguments[0] if is_given else None), rest


def _model_arguments(given: str, rest: list[str]) -> list[str]:
    for model in models():
        if model.name == given:
            # A bundled name takes precedence over a folder of the same name, which can be given as './NAME'.
            name = [] if _has(rest, "--served-model-name") else ["--served-model-name", model.served_name]
            dtype = [] if _has(rest, "--dtype") else ["--dtype", model.dtype]
            # Contents are compared because damage may keep a file's size. It takes a tenth of a second for 100 MB.
            return [str(obtain(given, _output.progress, verify=True)), *name, *dtype]
    # So does the name of an added model.
    if (added := path_to_serve(given, _output.progress)) is not None:
        return [str(added), *([] if _has(rest, "--served-model-name") else ["--served-model-name", given])]
    return [given]


def _has(arguments: list[str], option: str) -> bool:
    # vLLM accepts underscores in place of hyphens.
    spelled = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    return option in spelled


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port number (1 to 65535)")
    return int(text)
