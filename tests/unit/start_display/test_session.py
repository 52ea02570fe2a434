"""Tests where the output of a server goes, with small programs on a terminal in the place of servers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import termios
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

BEGIN = """
import fcntl, os, signal, sys, termios, time
from types import SimpleNamespace
from vllm_backplane.process import start_events
from vllm_backplane.process.fast_exit import exit_without_teardown
from vllm_backplane.start_display import log_folder, session

def begin():
    session.begin(verbose=False, custom_logging=False)

"""
END = """
print("a line of the log")
start_events.report("imports", vllm="0.33.0")
exit_without_teardown(0)
"""


class Program:
    """Runs a program on a terminal of its own."""

    def __init__(self, cache: Path, text: str) -> None:
        self.master, slave = os.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + text],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "BACKPLANE_CACHE": str(cache), "TERM": "xterm", "NO_COLOR": "1"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0),
        )
        os.close(slave)

    def end(self) -> tuple[int, str]:
        """Returns the status and the output when the program has ended, and its display too."""
        output = b""
        with contextlib.suppress(OSError):  # no process has the terminal any more
            while part := os.read(self.master, 1 << 16):
                output += part
        os.close(self.master)
        return self.wait(), output.decode().replace("\r\n", "\n")

    def wait(self) -> int:
        return self._process.wait(30)


def run(cache: Path, text: str) -> tuple[int, str]:
    return Program(cache, text).end()


def logs(cache: Path) -> list[str]:
    """Returns the contents of the folder for logs."""
    return [path.name.rpartition(".")[2] for path in (cache / "logs").iterdir()]


def test_the_log_goes_to_a_file_and_the_start_to_the_terminal(tmp_path: Path) -> None:
    status, text = run(tmp_path, "begin()" + END)
    assert status == 0
    assert "imports" in text
    assert "vLLM 0.33.0" in text
    assert text.endswith("Stopped.\n")
    assert "a line of the log" not in text
    (log,) = (tmp_path / "logs").iterdir()
    assert str(log) in text
    assert "a line of the log" in log.read_text()


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("log_folder.LONGEST_LOG = 1 << 60", "of free space"),
        ("def refuse(*_): raise OSError(30, 'Read-only file system')\nos.mkfifo = refuse", "Read-only file system"),
        ("def refuse(*_): raise OSError(11, 'no more processes')\nos.fork = refuse", "no more processes"),
    ],
    ids=["no room", "no pipe", "no process"],
)
def test_without_a_log_file_the_log_is_on_the_terminal(tmp_path: Path, before: str, reason: str) -> None:
    status, text = run(tmp_path, f"{before}\nbegin(){END}")
    assert status == 0
    assert "the log is shown here and not kept in a file: " in text
    assert reason in text
    assert "a line of the log" in text
    assert logs(tmp_path) == []


def test_a_cache_in_which_nothing_can_be_created_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    status, text = run(tmp_path, "begin()" + END)
    assert status == 0
    assert "a line of the log" in text


def test_the_first_process_of_a_container_writes_its_log(tmp_path: Path) -> None:
    status, text = run(tmp_path, "os.getpid = lambda: 1\nbegin()" + END)
    assert (status, text) == (0, "a line of the log\n")


@pytest.mark.parametrize("fault", ["", "sys.stdout = SimpleNamespace(flush=lambda: 1 / 0, write=sys.stderr.write)"])
def test_modes_that_do_not_report_that_they_are_ready_show_the_log(tmp_path: Path, fault: str) -> None:
    """The disk of the log may be full."""
    fault = fault.replace("1 / 0", "os.write(-1, b'')")
    status, text = run(tmp_path, f"begin()\n{fault}\nsession.check_mode(SimpleNamespace(headless=True)){END}")
    assert status == 0
    _before, found, after = text.partition("With --headless, the log of vLLM is shown:\n")
    assert found
    assert "a line of the log" in after
    assert logs(tmp_path) == ["log"]


def test_other_modes_keep_the_display(tmp_path: Path) -> None:
    status, text = run(tmp_path, "begin()\nsession.check_mode(SimpleNamespace(headless=False))" + END)
    assert status == 0
    assert "a line of the log" not in text


def test_a_failed_program_shows_the_end_of_its_log(tmp_path: Path) -> None:
    status, text = run(tmp_path, "begin()\nprint('the reason')\nexit_without_teardown(3)")
    assert status == 3
    assert "the reason" in text


def test_a_log_stays_bounded_when_the_terminal_is_closed(tmp_path: Path) -> None:
    program = Program(
        tmp_path,
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "log_folder.LONGEST_LOG = 1000\n"
        "begin()\n"
        "while True:\n"
        "    try:\n"
        "        os.get_terminal_size(0)\n"
        "    except OSError:\n"
        "        break\n"
        "    time.sleep(0.02)\n"
        "time.sleep(0.6)\n"  # the display writes to the closed terminal
        "print('x' * 2000, flush=True)\n"
        "end = time.monotonic() + 20\n"
        "while os.fstat(1).st_size and time.monotonic() < end:\n"
        "    time.sleep(0.02)\n"
        "exit_without_teardown(0 if time.monotonic() < end else 1)\n",
    )
    assert os.read(program.master, 1), "the display is there"
    os.close(program.master)
    assert program.wait() == 0


def test_a_display_in_the_background_stops_nobody(tmp_path: Path) -> None:
    """Tests `stty tostop`, with which the terminal stops the programs in the background that write to it."""
    text = (
        "modes = termios.tcgetattr(0)\n"
        "modes[3] |= termios.TOSTOP\n"
        "termios.tcsetattr(0, termios.TCSANOW, modes)\n"
        "job = os.fork()\n"
        "if job == 0:\n"
        "    os.setpgid(0, 0)\n"
        "    begin()\n"
        "    exit_without_teardown(0)\n"
        "_, status = os.waitpid(job, os.WUNTRACED)\n"
        "if os.WIFSTOPPED(status):\n"
        "    os.killpg(job, signal.SIGKILL)\n"
        "os._exit(os.WIFSTOPPED(status))\n"
    )
    status, output = run(tmp_path, text)
    assert status == 0
    assert "Stopped." in output
    assert " s …" not in output, "progress would be written over the prompt of the shell"
