"""Runs the C++ tests of the simulated NPU's driver: plain, and under the address and thread sanitizers.

The driver does not depend on Python, so its tests are a program (csrc/sim/tests), built in three variants. Scenarios
that kill a process (a stray access to a card's memory, an exit with queued work) run in a process of their own, with
the plain build.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests import compiled

pytestmark = pytest.mark.compiler

SIM = compiled.ROOT / "csrc" / "sim"
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
FLAGS = ["-std=c++17", "-pthread", *WARNINGS]
VARIANTS = {
    "plain": ["-O0"],
    "address": ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    "thread": ["-O1", "-g1", "-fsanitize=thread"],
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}
# Against hangs; the suite takes seconds.
DEADLINE = 300


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)  # type: ignore[call-overload]
    return done


def build(variant: str) -> Path:
    """Returns the test program. The files of a folder are compiled together, which saves most of the time: that of the
    standard library's headers. One by one, the build of the library compiles the driver's."""
    cxx = compiled.compiler()
    # Files are compiled together, so a name of one may hide a name of another. Clang cannot distinguish these cases.
    shadows = "-Wno-shadow" if compiled.is_clang(cxx) else "-Wshadow=local"
    flags = [*FLAGS, "-Wno-shadow", shadows, *VARIANTS[variant]]
    objects = []
    for part in ("driver", "tests"):
        files = [path for path in sorted((SIM / part).glob("*.cpp")) if path.name != "launch_cost.cpp"]
        included = [word for path in files for word in ("-include", str(path))]
        arguments = [*flags, *included, "-c", "-x", "c++", "/dev/null"]
        objects.append(compiled.build(f"sim_{part}_{variant}.o", arguments, [SIM / "driver", SIM / "tests"]))
    return compiled.build(f"driver_tests_{variant}", [*flags, *objects], [SIM / "driver", SIM / "tests"])


@pytest.fixture(scope="module")
def plain() -> Path:
    return build("plain")


def play(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(program), *words]
    environment = {**os.environ, **OPTIONS}
    done = run(command, env=environment, timeout=DEADLINE)
    if "unexpected memory mapping" in done.stdout and shutil.which("setarch"):
        # Older thread sanitizers do not know where newer kernels put things.
        done = run(["setarch", "-R", *command], env=environment, timeout=DEADLINE)
    return done


def test_the_header_is_plain_c() -> None:
    chosen = compiled.compiler()
    done = run([*chosen, "-x", "c", "-std=c11", *WARNINGS, "-fsyntax-only", str(SIM / "driver/driver.h")])
    assert done.returncode == 0, done.stdout


SANITIZERS = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("address", "thread")]


@pytest.mark.parametrize("variant", ["plain", *SANITIZERS])
def test_driver(variant: str) -> None:
    done = play(build(variant))
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d{2,} tests, 0 failures$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("scenario", ["exit_with_work_queued", "exit_while_hanging"])
@pytest.mark.parametrize("variant", SANITIZERS)
def test_leaving_in_the_middle_of_work_is_clean(variant: str, scenario: str) -> None:
    done = play(build(variant), "scenario", scenario)
    assert (done.returncode, done.stdout) == (0, "leaving\n")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("variant", "scenario", "report"),
    [
        ("address", "planted_leak", "LeakSanitizer: detected memory leaks"),
        ("thread", "planted_race", "ThreadSanitizer: data race"),
    ],
)
def test_the_sanitizers_would_find_it(variant: str, scenario: str, report: str) -> None:
    done = play(build(variant), "scenario", scenario)
    assert done.returncode != 0
    assert report in done.stdout


ALLOCATION = r"the allocation 0x[0-9a-f]+ of {bytes} bytes on card {card}\. "
REMEDY = r"The host cannot read or write a card's memory: copy it first \(tensor\.cpu\(\), bpsim_copy\)"
EARLY = (
    "backplane sim: missing synchronization: the host {} 0x[0-9a-f]+, byte {} of 64 in pinned memory that '{}' on "
    "stream 0 of card 0 {}, without waiting for it"
)
WENT_ON = r"(.|\n)*^went on$"
HOST = r"^backplane sim: the host accessed the device address 0x[0-9a-f]+: "


@pytest.mark.parametrize(
    ("scenario", "status", "text"),
    [
        ("host_reads", -signal.SIGSEGV, HOST + "byte 100 of " + ALLOCATION.format(bytes=1000, card=0) + REMEDY),
        ("host_writes", -signal.SIGSEGV, HOST + "byte 0 of " + ALLOCATION.format(bytes=4096, card=1) + REMEDY),
        ("host_reads_freed", -signal.SIGSEGV, HOST + r"not allocated: in a freed block of \d+ bytes of card 0\. "),
        ("host_reads_nowhere", -signal.SIGSEGV, HOST + r"not allocated: outside every segment of card 0\. "),
        (
            "launch_forgets_to_translate",
            -signal.SIGSEGV,
            r"the launch 'careless' accessed the device address 0x[0-9a-f]+: byte 4 of "
            + ALLOCATION.format(bytes=4096, card=0)
            + r"A launch must translate device pointers",
        ),
        (
            "launch_uses_returned_memory",
            -signal.SIGSEGV,
            (
                r"the launch 'late' accessed a card's memory by its kernel address .* not allocated: "
                r"outside every segment of card 0"
            ),
        ),
        # Of pinned memory: the host may touch it when it has waited for the copy, not when the copy happens to be done.
        ("host_reads_what_a_copy_writes", 0, EARLY.format("accessed", 3, "copy_d2h", "writes") + WENT_ON),
        ("host_writes_what_a_copy_reads", 0, EARLY.format("wrote", 3, "copy_h2d", "reads") + WENT_ON),
        ("host_is_told_and_goes_on", 0, EARLY.format("wrote", 3, "copy_h2d", "reads") + WENT_ON),
        *(
            (scenario, 0, r"^went on\n\n" + EARLY.format("wrote", 0, "copy_h2d", "reads") + r".*\n\Z")
            for scenario in ("neighbours_of_a_copy_are_the_hosts", "reads_beside_many_copies_are_the_hosts")
        ),
        # Handlers that were installed before still run: second for the device's faults, first and alone for others.
        ("previous_handler_follows", 42, r"(?s)the host accessed .* 0 of .* on card 0.*the previous handler"),
        ("handler_comes_back_on_top", 42, r"(?s)the host accessed .* on card 0.*the previous handler"),
        (
            "handlers_that_hand_back_do_not_take_turns_for_ever",
            -signal.SIGSEGV,
            r"\A\nbackplane sim: the host accessed .* 0 of .* on card 0.*\na later handler\n\Z",
        ),
        ("other_faults_are_left_alone", 42, r"\Athe previous handler\n\Z"),
        ("other_faults_kill_as_ever", -signal.SIGSEGV, r"\A\Z"),
        ("a_signal_that_was_sent_kills", -signal.SIGSEGV, r"\A\Z"),
        ("no_handler", -signal.SIGSEGV, r"\A\Z"),
        ("exit_with_work_queued", 0, r"\Aleaving\n\Z"),
        ("exit_while_hanging", 0, r"\Aleaving\n\Z"),
        ("exit_with_endless_launch", 0, r"\Abackplane sim: launch 'endless' on card 0, stream 0 does not end"),
    ],
)
def test_how_a_process_ends(plain: Path, scenario: str, status: int, text: str) -> None:
    done = play(plain, "scenario", scenario)
    assert done.returncode == status, done.stdout
    assert re.search(text, done.stdout, re.MULTILINE), done.stdout
