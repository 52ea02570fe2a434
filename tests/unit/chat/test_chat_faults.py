"""Tests one question to a server that misbehaves, or to a wrong address: the output, and one line of error."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Iterator

import chat_stand_in
import pytest
from chat_stand_in import DONE, StandIn, event, refuse, stream

from vllm_backplane.chat.client import Client
from vllm_backplane.chat.endpoint import Endpoint
from vllm_backplane.cli import main
from vllm_backplane.errors import BackplaneError

DEEP = b"[" * 100_000
CONTEXT = {"error": {"message": "This model's maximum context length is 5 tokens.", "code": 400}}


@pytest.fixture(autouse=True)
def _handlers_and_keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def server() -> Iterator[tuple[StandIn, str]]:
    with chat_stand_in.running() as (stand_in, address):
        yield stand_in, address


def pipe(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    """Replaces the standard input by a pipe with this text."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["chat", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_a_question_is_answered_on_standard_output_alone(server, monkeypatch, capsys):
    stand_in, address = server
    stand_in.answer = lambda handler: stream(
        handler, b": ping\n", event("", role="assistant"), event("a\x1b[1m"), event("b", finish="stop", tokens=2), DONE
    )
    pipe(monkeypatch, b"from the pipe\n")
    assert main(["chat", "--url", f"{address}/v1/", "--system", "be short", "--set", "max_tokens=5"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("a\x1b[1mb\n", "")  # a file gets the answer as it is
    (request,) = stand_in.requests
    assert request["max_tokens"] == 5
    assert request["messages"] == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "from the pipe"},
    ]


def test_a_question_has_a_part_from_the_command_line_and_one_from_the_pipe(server, monkeypatch):
    stand_in, address = server
    pipe(monkeypatch, b"text\n")
    assert main(["chat", "-", "--url", address, "-p", "Summarize:"]) == 0
    assert stand_in.requests[0]["messages"][0]["content"] == "Summarize:\n\ntext"


def test_an_answer_that_is_cut_off_is_worth_a_line(server, capsys):
    stand_in, address = server
    stand_in.answer = lambda handler: stream(handler, event("par", finish="length"), DONE)
    assert main(["chat", "--url", address, "-p", "hi"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "par\n"
    assert "cut off at the limit of tokens; raise it with --set max_tokens=N" in captured.err


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_an_empty_answer_is_an_error(server, capsys, flags):
    stand_in, address = server
    stand_in.answer = lambda handler: stream(handler, event("", reasoning="hm", finish="stop"), DONE)
    assert main(["chat", "--url", address, "-p", "hi", *flags]) == 1
    captured = capsys.readouterr()
    assert bool(captured.out) is bool(flags)
    assert "the answer is empty" in captured.err


def test_a_pipe_that_is_no_text_is_refused(server, monkeypatch, capsys):
    pipe(monkeypatch, b"caf\xe9")
    assert main(["chat", "--url", server[1]]) == 2
    assert "not a text in UTF-8" in capsys.readouterr().err


def test_json_has_the_answer_and_its_statistics(server, capsys):
    stand_in, address = server
    thought = event("", reasoning="hm")
    stand_in.answer = lambda handler: stream(handler, thought, event("yes", finish="stop", tokens=9), DONE)
    assert main(["chat", "second", "--url", address, "-p", "?", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    statistics = found.pop("statistics")
    assert found == {"model": "second", "answer": "yes", "reasoning": "hm", "finish_reason": "stop"}
    assert (statistics["prompt_tokens"], statistics["completion_tokens"]) == (7, 9)
    assert 0 < statistics["seconds_to_first_token"] < statistics["seconds"]
    assert statistics["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("answer", "output", "message"),
    [
        (refuse(401, {"error": "Unauthorized"}), "", "refused the API key (401); set VLLM_API_KEY"),
        (refuse(404, {"detail": "Not Found"}), "", "no chat API (404): Not Found"),
        (refuse(400, CONTEXT), "", "longer than the model's context; begin anew (/clear)"),
        (refuse(400, {"error": {"message": "top_p must be\nin (0, 1]"}}), "", "request (400): top_p must be in (0, 1]"),
        (refuse(500, b"\x1b[31mdown"), "", "the server failed (500): ␛[31mdown; its log has the reason"),
        (refuse(503, b""), "", "the server failed (503): Service Unavailable"),
        (refuse(200, {"choices": []}), "", "is not understood: it answered with application/json"),
        (lambda handler: stream(handler, event("par")), "par\n", "ended in the middle of the answer"),
        (lambda handler: stream(handler, event("par"), b"data: {tru"), "par\n", "ended in the middle of the answer"),
        (lambda handler: stream(handler, b"data: {garbage\n"), "", "is not understood: it sent '{garbage'"),
        (lambda handler: stream(handler, b"data: [1]\n"), "", "is not understood: it sent '[1]'"),
        (lambda handler: stream(handler, b"data: " + DEEP + b"\n"), "", "is not understood: it sent '[[["),
        (refuse(400, DEEP), "", "the server refused the request (400): [[["),
        (
            lambda handler: stream(handler, event("a"), b'data: {"error": {"message": "engine died"}}\n', DONE),
            "a\n",
            "the server stopped the answer: engine died",
        ),
        (lambda handler: handler.wfile.write(b"\x00garbage\n\n"), "", "does not speak HTTP (BadStatusLine)"),
        (lambda handler: handler.connection.close(), "", "was lost"),
    ],
)
def test_a_fault_is_one_line_with_the_remedy(server, capsys, answer, output, message):
    stand_in, address = server
    stand_in.answer = answer
    assert main(["chat", "--url", address, "-p", "hi"]) == 1
    captured = capsys.readouterr()
    assert captured.out == output
    assert message in captured.err
    assert captured.err.startswith("vllm-backplane: error: ")
    assert captured.err.count("\n") == 1
    assert "\x1b" not in captured.err


def test_a_server_that_sends_nothing_is_given_up(server, capsys):
    stand_in, address = server
    ended = stand_in.disconnected

    def silent(handler):
        stream(handler, event("a"))
        ended.wait(60)

    stand_in.answer = silent
    assert main(["chat", "--url", address, "-p", "hi", "--timeout", "0.2"]) == 1
    ended.set()
    captured = capsys.readouterr()
    assert captured.out == "a\n"
    assert "sent nothing for 0.2 s" in captured.err


def test_a_line_without_end_is_not_collected_in_memory(server, capsys, monkeypatch):
    stand_in, address = server
    monkeypatch.setattr("vllm_backplane.chat.client.MAX_LINE", 1000)
    stand_in.answer = lambda handler: stream(handler, b"data: " + b"x" * 5000)
    assert main(["chat", "--url", address, "-p", "hi"]) == 1
    assert "in the middle of the answer" in capsys.readouterr().err


def test_a_model_is_selected_among_those_that_are_served(server, capsys):
    _, address = server
    assert main(["chat", "secnd", "--url", address, "-p", "hi"]) == 1
    assert "does not serve 'secnd'; did you mean 'second'? It serves: first, second" in capsys.readouterr().err


@pytest.mark.parametrize("models", [{}, [], {"data": []}, {"data": [{"name": "x"}]}])
def test_a_server_without_models_is_refused(server, capsys, models):
    stand_in, address = server
    stand_in.models = models
    assert main(["chat", "--url", address, "-p", "hi"]) == 1
    assert "lists no models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "arguments", "sent"),
    [
        ({}, (), None),
        ({"OPENAI_API_KEY": "o"}, (), None),
        ({"OPENAI_API_KEY": "o", "VLLM_API_KEY": "v"}, (), "Bearer v"),
        ({"VLLM_API_KEY": "v"}, ("--api-key", "a"), "Bearer a"),
    ],
)
def test_the_key_comes_from_the_argument_or_a_variable(server, monkeypatch, variables, arguments, sent):
    stand_in, address = server
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["chat", "--url", address, "-p", "hi", *arguments]) == 0
    assert stand_in.keys == [sent]


@pytest.mark.parametrize("key", ["", "v"])
def test_a_key_that_crosses_a_network_unencrypted_is_worth_a_warning(server, monkeypatch, capsys, key):
    monkeypatch.setenv("VLLM_API_KEY", key)
    monkeypatch.setattr(Endpoint, "is_in_the_clear", True)
    assert main(["chat", "--url", server[1], "-p", "hi"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(key) and all("the API key crosses the network" in line for line in lines)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://example.org", True),
        ("http://192.0.2.7:8000/v1", True),
        ("https://example.org", False),
        ("http://localhost:8000", False),
        ("http://127.0.0.2", False),
        ("http://[::1]:8000", False),
        ("unix:/run/s", False),
    ],
)
def test_what_crosses_a_network_unencrypted_is_known(url, expected):
    assert Endpoint.parse(url).is_in_the_clear is expected


def test_a_key_that_no_header_can_hold_is_refused(server, capsys):
    assert main(["chat", "--url", server[1], "-p", "hi", "--api-key", "a\nX: b"]) == 1
    assert "not printable ASCII" in capsys.readouterr().err


def test_a_server_may_listen_on_a_unix_socket(tmp_path, capsys):
    with chat_stand_in.running(str(tmp_path / "s")) as (_, address):
        assert main(["chat", "--url", address, "-p", "hi"]) == 0
    assert capsys.readouterr().out == "hello\n"
    assert main(["chat", "--url", address, "-p", "hi"]) == 1
    assert f"cannot connect to {address}" in capsys.readouterr().err


def test_mistakes_on_the_command_line_are_usage_errors(monkeypatch, capsys):
    server = ("--url", "http://127.0.0.1:1")
    assert "unknown argument: --max-model-len 5" in usage_error(capsys, *server, "-p", "a", "--max-model-len", "5")
    assert "unknown argument: --pipeline-parallel-size 2" in usage_error(capsys, *server, "-p", "a", "-pp", "2")
    assert "did you mean 'top_p'?" in usage_error(capsys, *server, "-p", "a", "--set", "topp=1")
    assert "top_k='x' is not an integer" in usage_error(capsys, *server, "-p", "a", "--set", "top_k=x")
    assert "--api-key is the key of a running server" in usage_error(capsys, "-p", "a", "--api-key", "k")
    assert "--uds is not for" in usage_error(capsys, "smollm2", "-p", "a", "--uds=/tmp/s")
    assert "not a positive number" in usage_error(capsys, "-p", "a", "--timeout", "nan")
    pipe(monkeypatch, b" \n")
    assert "the question is empty" in usage_error(capsys, *server)


@pytest.mark.parametrize("option", ["--grpc", "--grpc_port=5", "--api_key=x", "--ssl-keyf", "--uds"])
def test_a_private_server_listens_nowhere_else(capsys, option):
    assert "is not for a server of one conversation" in usage_error(capsys, "smollm2", "-p", "a", option)


@pytest.mark.parametrize("line", ["ssl_keyfile: a.pem", "api-key: x", "host: 0.0.0.0", "grpc: true", "headless: true"])
def test_nor_does_a_configuration_file_put_it_elsewhere(tmp_path, capsys, line):
    (tmp_path / "c.yaml").write_text(f"max-model-len: 64\n{line}\n")
    given = ("smollm2", "-p", "a", "--config", str(tmp_path / "c.yaml"))
    assert "is not for a server of one conversation" in usage_error(capsys, *given)


def test_models_that_are_nested_too_deeply_are_not_understood(server, capsys):
    stand_in, address = server
    stand_in.models = DEEP
    assert main(["chat", "--url", address, "-p", "hi"]) == 1
    assert "something other than JSON" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://a", "http://", "http://a:x", "http://u:p@a", "unix:a"])
def test_an_address_is_checked(capsys, url):
    assert "write " in usage_error(capsys, "--url", url, "-p", "a")


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, ""),
        ("http://[::1]:8000/v1", "::1", 8000, ""),
        ("https://example.org/proxy/v1/", "example.org", None, "/proxy"),
    ],
)
def test_an_address_has_a_host_a_port_and_a_prefix(url, host, port, prefix):
    found = Endpoint.parse(url)
    assert (found.host, found.port, found.prefix) == (host, port, prefix)
    assert found.tls == url.startswith("https")


def test_the_health_of_a_server_that_is_gone_is_no_error():
    assert not Client(Endpoint.unix("/nonexistent/socket"), None, 1.0).is_healthy()
    with pytest.raises(BackplaneError, match="cannot connect"):
        Client(Endpoint.unix("/nonexistent/socket"), None, 1.0).models()
