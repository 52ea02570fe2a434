"""Tests what a user sees who runs `vllm-backplane serve` on a terminal, from the start to the end of the server."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from ending_servers import SMALL
from terminals import OnTerminal

from tests.ports import free_port

pytestmark = [pytest.mark.server, pytest.mark.models]

NAME = "we\x1b[31mird 'name'\x07"
"""Name of the model, which a terminal would execute in part, and a shell too."""
MOST_LINES = 25


@dataclass(frozen=True)
class Transcript:
    """Records a start, a request, and the end by Ctrl-C."""

    lines: list[str]
    raw: str
    answer: str
    status: int

    @property
    def log(self) -> Path:
        return log_of(self.lines)


def log_of(lines: list[str]) -> Path:
    """Returns the path of the log that the terminal names."""
    (line,) = [line for line in lines if line.startswith("  log ")]
    return Path(line.split(maxsplit=1)[1])


def arguments(model: Path, *more: str) -> tuple[str, ...]:
    return (str(model), *SMALL, *more, "--port", str(free_port()))


@pytest.fixture(scope="module")
def transcript(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Transcript]:
    folder = tmp_path_factory.mktemp("terminal")
    given = arguments(tiny_llama, "--served-model-name", NAME)
    with OnTerminal(folder, *given) as server:
        server.expect("\n  -d ")
        server.expect("}'\n")
        place = next(number for number, line in enumerate(server.lines) if line.startswith("curl "))
        curl = "\n".join(server.lines[place : place + 2])
        request = ["bash", "-c", f"{curl} --silent --max-time 120"]
        answer = subprocess.run(
            request, capture_output=True, text=True, env={**os.environ, "no_proxy": "127.0.0.1"}, check=True
        )
        server.press_ctrl_c()
        status = server.wait()
        yield Transcript(server.lines, server.text, answer.stdout, status)


def test_the_phases_are_shown_in_order(transcript: Transcript) -> None:
    labels = [line.split()[0] for line in transcript.lines if line[:20].endswith(" s")]
    assert labels == ["imports", "model", "engine", "weights", "KV", "warm-up", "server"]
    assert any("device" in line and "cpu: requested by BACKPLANE_DEVICE" in line for line in transcript.lines)
    assert any("model" in line and "full precision" in line and "MiB" in line for line in transcript.lines)


def test_the_start_fits_on_a_screen_and_no_line_is_of_a_log(transcript: Transcript) -> None:
    ready = next(number for number, line in enumerate(transcript.lines) if line.startswith("  -d "))
    assert ready < MOST_LINES, transcript.raw
    assert not re.search(r"Route|INFO|WARNING \d|FutureWarning|pid=", transcript.raw)
    warnings = [line for line in transcript.lines if "warning: " in line]
    assert ["Development endpoints are enabled" in line for line in warnings] == [True], "tests enable them"


def test_the_command_that_is_shown_is_answered(transcript: Transcript) -> None:
    assert json.loads(transcript.answer)["model"] == NAME


def test_a_name_cannot_control_the_terminal(transcript: Transcript) -> None:
    """The variable TERM of the tests may allow styles, so only what the name would add is looked for."""
    assert "\x1b[31m" not in transcript.raw
    assert "\x07" not in transcript.raw
    assert r"we\x1b[31mird 'name'\x07" in transcript.raw


def test_ctrl_c_ends_the_server_without_a_traceback(transcript: Transcript) -> None:
    assert transcript.status == 130
    assert [line for line in transcript.lines if line][-2:] == ["Stopping…", "Stopped."]
    assert "Traceback" not in transcript.raw


def test_the_log_has_everything_and_is_private(transcript: Transcript) -> None:
    log = transcript.log
    assert "Route: /health" in log.read_text()
    assert "Start: step=weights" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700
    assert not log.with_suffix(".pipe").exists()


def test_verbose_shows_the_log(tiny_llama: Path, tmp_path: Path) -> None:
    with OnTerminal(tmp_path, *arguments(tiny_llama), "--verbose") as server:
        server.expect("Initializing a V1 LLM engine")
        server.expect("Start: step=weights")
        server.expect("Start: step=ready")
        assert "Ready after" not in server.text
        server.press_ctrl_c()
        assert server.wait() == 130


def test_a_failed_start_shows_the_error_and_the_log(tiny_llama: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_llama, broken)
    os.truncate(broken / "model.safetensors", 2048)  # within the header
    with OnTerminal(tmp_path, *arguments(broken)) as server:
        assert server.wait() == 1
        *_, place = [line for line in server.lines if line]
        errors = [line for line in server.lines if line.startswith("Error: ")]
        assert len(errors) == 1
        assert f"the checkpoint {broken} cannot be read" in " ".join(server.text.split())
        assert place == f"The log of the server is {log_of(server.lines)}"
        assert "Traceback" not in server.text
        assert "Traceback" in log_of(server.lines).read_text()
        assert len(server.lines) <= MOST_LINES, server.text


def test_ctrl_c_while_libraries_are_imported(tiny_llama: Path, tmp_path: Path) -> None:
    variables = {"TERM": "xterm", "NO_COLOR": "1"}
    with OnTerminal(tmp_path, *arguments(tiny_llama), warm=False, variables=variables) as server:
        server.expect(r"imports +[1-9]\d* s")
        server.press_ctrl_c()
        assert server.wait() == 130
        assert [line for line in server.lines if line][-2:] == ["Stopping…", "Stopped."]
        assert "Traceback" not in server.text
        assert "\x1b" not in server.text
