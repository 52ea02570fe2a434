"""Tests `vllm-backplane chat` with a server of its own, and `vllm-backplane bench`, with real models."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
from ending_servers import HANG_SECONDS
from processes import environment
from server import COMMAND

from tests.pseudo_terminal import CTRL_C, PseudoTerminal

pytestmark = [pytest.mark.server, pytest.mark.models]

PROMPT = ">>> "
SMALL = ("--max-model-len", "512", "--max-num-seqs", "2")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Returns a folder with a short path, as the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="chat") as made:
        yield Path(made)


def variables(folder: Path) -> Mapping[str, str]:
    """Returns an environment in which all files of the command are below a folder."""
    return environment(TMPDIR=str(folder), XDG_STATE_HOME=str(folder / "state"), VLLM_API_KEY=None)


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def private_files(folder: Path) -> list[Path]:
    """Returns the files of private servers among the temporary files."""
    return sorted(path for path in folder.glob("vllm-backplane-*/*/*") if path.parent.name.startswith("chat-"))


def test_a_conversation_with_a_server_of_its_own(folder):
    with PseudoTerminal([COMMAND, "chat", "smollm2", *SMALL], variables(folder), folder) as talk:
        assert "the server is ready after" in talk.expect(PROMPT)
        started = descendants(talk.process.pid)
        assert started
        key = started[0].environ()["VLLM_API_KEY"]
        assert not any(key in " ".join(process.cmdline()) for process in started)
        assert not any(connection.status == psutil.CONN_LISTEN for connection in started[0].net_connections("inet"))
        (log, _socket) = private_files(folder)
        assert log.parent.stat().st_mode & 0o077 == 0

        def say(text: str) -> str:
            talk.type(f"{text}\n")
            return talk.expect(PROMPT)

        say("/set temperature=0")
        assert "Tokyo" in say("What is the capital of Japan?")
        stats = say("/stats")
        assert re.search(
            r"last answer: +\d+ tokens, first token after [\d.]+ s, [\d.]+ tokens/s after it, prompt", stats
        )
        talk.type("Write a very long story about a whale.\n")
        talk.expect("whale.")
        talk.expect(" the ")
        talk.type(CTRL_C)
        talk.expect("(stopped)")
        talk.expect(PROMPT)
        assert re.search(r"last answer: +\d+ tokens?, first token", say("/stats"))  # although its end never came
        assert "error: the conversation is longer than the model's context" in say("word " * 1500)
        assert "Paris" in say("What is the capital of France?")

        os.kill(started[0].pid, signal.SIGKILL)
        assert f"the server has ended: signal 9 ended it; its log is {log}" in say("Hello?")
        assert "saved 3 answers" in say("/save talk.json")
        talk.type("/exit\n")
        assert talk.wait() == 0
    _gone, left = psutil.wait_procs(started, timeout=HANG_SECONDS)
    assert left == []
    assert private_files(folder) == [log]


@pytest.mark.exhaustive
@pytest.mark.parametrize("end", [None, signal.SIGTERM, signal.SIGKILL])
def test_a_server_of_its_own_ends_with_the_command(folder, tiny_llama, end):
    """A pipe is answered, and ends the server; so do signals in the middle of the answer."""
    command = [COMMAND, "chat", str(tiny_llama), "--max-model-len", "2048", "--set", "temperature=0"]
    asking = subprocess.Popen(
        command, env=variables(folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert asking.stdin is not None and asking.stdout is not None and asking.stderr is not None
    asking.stdin.write(b"word")
    asking.stdin.close()
    first = asking.stdout.read(1)
    assert first
    started = descendants(asking.pid)
    assert started
    if end is not None:
        asking.send_signal(end)
    asking.stdout.read()
    log = asking.stderr.read().decode()
    status = asking.wait(HANG_SECONDS)
    assert status == {None: 0, signal.SIGTERM: 143, signal.SIGKILL: -9}[end], log
    assert all(line.startswith("vllm-backplane: ") for line in log.splitlines())
    _gone, left = psutil.wait_procs(started, timeout=HANG_SECONDS)
    assert left == []
    assert bool(private_files(folder)) is (end is signal.SIGKILL)


def test_a_model_that_cannot_be_served_is_a_usage_error(folder):
    done = subprocess.run(
        [COMMAND, "chat", "./nothing", "-p", "hi"],
        env=variables(folder),
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "nothing" in done.stderr.splitlines()[-1]
    assert done.stdout == ""
    assert private_files(folder) == []


def test_the_speed_of_this_machine(folder, tiny_llama):
    command = [COMMAND, "bench", str(tiny_llama), "--seconds", "1", "--json", "--dtype", "float32"]
    done = subprocess.run(command, env=variables(folder), cwd=folder, capture_output=True, text=True)
    logs = [path.read_text() for path in folder.glob("vllm-backplane-*/bench-*/log")]
    assert done.returncode == 0, "\n".join([done.stderr, *logs])
    found = json.loads(done.stdout)
    figures = {figure["name"]: figure for figure in found["figures"]}
    points = ("decode, 1 sequence", "decode, 4 sequences", "decode, 16 sequences", "prefill, prompt of 128")
    for name in (*points, "time to first token, prompt of 128", "memory, reading"):
        assert 0 < figures[name]["least"] <= figures[name]["median"] <= figures[name]["most"]
    assert (found["device"], found["dtype"], found["workers"]) == ("cpu", "float32", 1)
    assert found["threads"] >= 1
    assert {"torch", "vllm-backplane", "Python"} <= set(found["versions"])
    weights = json.loads((tiny_llama / "config.json").read_text())
    hidden, layers = weights["hidden_size"], weights["num_hidden_layers"]
    kv = hidden * weights["num_key_value_heads"] // weights["num_attention_heads"]
    per_layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * weights["intermediate_size"] + 2 * hidden
    parameters = layers * per_layer + hidden + hidden * weights["vocab_size"]
    assert found["weight_bytes_per_token"] == pytest.approx(4 * parameters, rel=0.02)
    # How large the share is depends on what else the machine does, and is not asserted.
    read = figures["weights, read by decode, 1 sequence"]["median"]
    decoded = figures["decode, 1 sequence"]["median"]
    assert read == pytest.approx(decoded * found["weight_bytes_per_token"] / 1e9)
    share = read / figures["memory, reading"]["median"]
    if found["reliable"]:
        assert found["share_of_bandwidth"] == pytest.approx(share)
    else:
        assert found["share_of_bandwidth"] is None
    assert private_files(folder) == []
