"""Talk to a model in the terminal, or answer one question.

MODEL is what 'vllm-backplane serve' accepts; without it, the default model is used. A server is started for the
conversation, and ends with it. Every argument that is not listed below is passed on to that server, and must follow
MODEL:

  vllm-backplane chat smollm2 --max-model-len 2048

With --url, a running server is used, and MODEL selects one of the models that it serves.

A question in --prompt, or one that is piped in ('-' reads it from a terminal too), is answered on standard output; all
else goes to standard error. With --prompt, standard input is read only if there is '-':

  git diff | vllm-backplane chat --system 'Write a commit message.'
  git diff | vllm-backplane chat --prompt 'Is there a mistake in this?' -

With --json, the keys are: model, answer, reasoning, finish_reason, statistics (prompt_tokens, completion_tokens,
seconds_to_first_token, seconds, tokens_per_second; null where the server reports no number).
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from vllm_backplane.cli import _output, _owned
from vllm_backplane.early_checks.config_file import arguments_of, split_config
from vllm_backplane.errors import BackplaneError, UsageError, nearest, short_repr

if TYPE_CHECKING:
    from vllm_backplane.chat.client import Client, ServedModel
    from vllm_backplane.chat.conversation import Conversation
    from vllm_backplane.chat.private_server import PrivateServer

NAME = "chat"
HELP = "talk to a model in the terminal"
PASSES_ON = True

KEY_VARIABLE = "VLLM_API_KEY"
NOT_PASSED_ON = ("--host", "--port", "--uds", "--api-key", "--dry-run", "--headless", "--root-path", "--ssl-keyfile",
                 "--ssl-certfile", "--grpc", "--grpc-port")  # fmt: skip
"""Options of 'serve' that would put the server where this command does not look for it."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [-] [--url URL] [--prompt TEXT] [options] [vllm serve arguments ...]"
    parser.add_argument("--url", help="use the server at this address, such as http://127.0.0.1:8000 or unix:/run/s")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"key of that server; other users can see it, so better set {KEY_VARIABLE}",
    )
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="answer this question, and exit")
    parser.add_argument("--system", metavar="TEXT", default="", help="system prompt")
    parser.add_argument(
        "--set", metavar="NAME=VALUE", action="append", default=[], help="parameter of the requests (repeatable)"
    )
    parser.add_argument("--no-history", action="store_true", help="neither read nor write the history of messages")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="longest time to wait for the next part of an answer (default: %(default)s)",
    )
    # Without these two, the parser would take -pp and -pcp for -p with a value.
    for flag, name in (("-pp", "--pipeline-parallel-size"), ("-pcp", "--prefill-context-parallel-size")):
        parser.add_argument(flag, name, metavar="N", help="passed on to the server")
    _output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from vllm_backplane.chat import signals
    from vllm_backplane.chat.conversation import Conversation

    rest = [argument for argument in args.rest if argument != "-"]
    given = rest.pop(0) if rest and not rest[0].startswith("-") else None
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size"):
        if getattr(args, name) is not None:
            rest += [f"--{name.replace('_', '-')}", getattr(args, name)]
    _check_arguments(args, rest)
    conversation = Conversation(args.system)
    try:
        for assignment in args.set:
            conversation.set(assignment)
    except BackplaneError as fault:
        args.parser.error(f"--set: {fault}")
    question = _question(args)
    if question is None and args.json:
        args.parser.error("--json is for one question; add --prompt TEXT, or pipe the question in")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    signals.interrupt_waits()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if question is None:
        return _talk(args, given, rest, conversation)
    with _server(args, given, rest) as (client, server):
        return _answer(args, client, server, given, conversation, question)


def _check_arguments(args: argparse.Namespace, rest: list[str]) -> None:
    """Ends the program with a usage error if arguments exclude each other."""
    if args.url is None:
        if args.api_key is not None:
            args.parser.error("--api-key is the key of a running server; add --url, or remove it")
        _refuse_other_addresses(args.parser, rest)
        return
    from vllm_backplane.chat.endpoint import Endpoint

    if rest:
        args.parser.error(f"unknown argument: {' '.join(rest)} (with --url, no server is started)")
    try:
        Endpoint.parse(args.url)
    except BackplaneError as fault:
        args.parser.error(f"--url: {fault}")


def _refuse_other_addresses(parser: argparse.ArgumentParser, rest: list[str]) -> None:
    file, others = split_config(rest)
    in_file = arguments_of(file, ()) if file is not None else []
    for argument in (*others, *in_file):
        name = argument.partition("=")[0].replace("_", "-")
        # vLLM accepts abbreviations.
        if len(name) > 2 and any(option.startswith(name) for option in NOT_PASSED_ON):
            parser.error(f"{name} is not for a server of one conversation; start 'serve', and give --url")


def _question(args: argparse.Namespace) -> str | None:
    """Returns the question to answer, or None for a conversation."""
    piped = "-" in args.rest or (args.prompt is None and not sys.stdin.isatty())
    if args.prompt is None and not piped:
        if not sys.stdout.isatty():
            args.parser.error("standard output is no terminal; give a question with --prompt, or pipe it in")
        return None
    parts = [args.prompt or ""]
    if piped:
        try:
            parts.append(sys.stdin.buffer.read().decode())
        except UnicodeDecodeError:
            raise UsageError("standard input is not a text in UTF-8; convert it, for example with iconv") from None
    question = "\n\n".join(filter(None, (part.strip("\n") for part in parts)))
    if not question.strip():
        args.parser.error("the question is empty; give one with --prompt, or pipe it in")
    return question


@contextmanager
def _server(
    args: argparse.Namespace, given: str | None, rest: list[str]
) -> Iterator[tuple[Client, PrivateServer | None]]:
    """Yields a client of the server to use, and the server if it was started here. It ends with the context."""
    from vllm_backplane.chat.client import Client
    from vllm_backplane.chat.endpoint import Endpoint
    from vllm_backplane.chat.private_server import PrivateServer
    from vllm_backplane.process import owned_process

    if args.url is not None:
        key, endpoint = args.api_key or os.environ.get(KEY_VARIABLE), Endpoint.parse(args.url)
        if key and endpoint.is_in_the_clear:
            _output.progress(
                f"warning: the API key crosses the network to {endpoint.shown} unencrypted; use https, or a tunnel"
            )
        yield Client(endpoint, key, args.timeout), None
        return
    began = time.monotonic()
    command = owned_process.command(_owned.__name__, ["serve", *([given] if given else []), *rest])
    with PrivateServer(command, os.environ) as server:
        _output.progress(f"starting a server; its log is {server.log}")
        server.wait_until_ready(_output.progress)
        _output.progress(f"the server is ready after {time.monotonic() - began:.1f} s")
        yield Client(server.endpoint, server.api_key, args.timeout), server


def _model(args: argparse.Namespace, client: Client, given: str | None) -> ServedModel:
    """Returns the model to talk to: the first one, or with --url the one that was asked for."""
    models = client.models()
    if args.url is None or given is None:
        return models[0]
    names = [model.name for model in models]
    if given not in names:
        raise BackplaneError(f"the server does not serve {short_repr(given)}{nearest(given, names)} {_serves(names)}")
    return models[names.index(given)]


def _serves(names: list[str]) -> str:
    from vllm_backplane.safe_text import one_line

    return one_line(f"It serves: {', '.join(names)}")


def _talk(args: argparse.Namespace, given: str | None, rest: list[str], conversation: Conversation) -> int:
    from vllm_backplane.chat.session import NAMES, Session
    from vllm_backplane.chat.terminal import History, Terminal, history_file

    history = None if args.no_history else History(history_file())
    with _server(args, given, rest) as (client, server):
        return Session(client, _model(args, client, given), conversation, Terminal(history, NAMES), server).run()


def _answer(
    args: argparse.Namespace,
    client: Client,
    server: PrivateServer | None,
    given: str | None,
    conversation: Conversation,
    question: str,
) -> int:
    """Answers one question on standard output, and returns the exit status."""
    from vllm_backplane.chat.client import Piece
    from vllm_backplane.chat.conversation import Answer
    from vllm_backplane.safe_text import safe

    shown = safe if sys.stdout.isatty() else str  # a file gets the answer as it is

    def show(piece: Piece) -> None:
        if piece.text and not args.json:
            print(shown(piece.text), end="", flush=True)

    answer = Answer()
    try:
        model = _model(args, client, given)
        answer.receive(client.stream(model, conversation.messages(question), conversation.parameters), show)
    except BackplaneError as fault:
        if answer.text and not args.json:
            print()
        raise (server.explained(fault) if server else fault) from fault
    if args.json:
        _output.print_json(
            {
                "model": model.name,
                "answer": answer.text,
                "reasoning": answer.reasoning,
                "finish_reason": answer.finish,
                "statistics": answer.statistics(),
            }
        )
    elif answer.text and not answer.text.endswith("\n"):
        print()
    if answer.finish == "length":
        _output.progress(
            "the answer is cut off at the limit of tokens; raise it with --set max_tokens=N, or serve with a larger "
            "--max-model-len"
        )
    if not answer.text.strip():
        _output.progress("the answer is empty; --json shows what else the server has sent")
        return 1
    return 0


def _end(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds
