"""The driver of the simulated NPU, by its own C++ tests: as it is, and under the address and thread sanitizers.

The driver knows nothing of Python, so its tests are a program (csrc/sim/tests). Three builds of it are kept in the
build folder and made anew when a source changes. What kills a process (a stray access to a card's memory, an exit
with work queued) is a scenario that the plain build plays in a process of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
SIM = ROOT / "csrc/sim"
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


def compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        return chosen
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    pytest.fail("no C++ compiler; install g++, or name one with CXX")


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)  # type: ignore[call-overload]
    return done


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One build of a folder at a time, also between processes."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def sources(folder: Path) -> list[Path]:
    """All but the programs that are not tests. Those of a folder are compiled together, which spares most of the time:
    that of the standard library's headers. One by one, the build of the library compiles the driver's."""
    found = [
        [path for path in sorted((SIM / part).glob("*.cpp")) if path.name != "launch_cost.cpp"]
        for part in ("driver", "tests")
    ]
    together = []
    for paths in found:
        together.append(folder / f"all_of_{paths[0].parent.name}.cpp")
        together[-1].write_text("".join(f'#include "{path}"\n' for path in paths))
    return together


def build(variant: str) -> Path:
    """The test program, built unless nothing has changed."""
    cxx = compiler()
    # Files are compiled together, and a name of one over that of another is none. Clang cannot tell the others apart.
    shadows = "-Wno-shadow" if "clang" in run([*cxx, "--version"]).stdout else "-Wshadow=local"
    flags = [*FLAGS, "-Wno-shadow", shadows, *VARIANTS[variant]]
    state = hashlib.sha256(shlex.join([*cxx, *flags]).encode())
    for path in sorted([*(SIM / "driver").iterdir(), *(SIM / "tests").iterdir()]):
        state.update(path.name.encode() + path.read_bytes())
    folder = ROOT / "build" / f"sim-driver-{variant}"
    program, record = folder / "driver_tests", folder / "made-of"
    with alone(folder):
        if program.is_file() and record.is_file() and record.read_text() == state.hexdigest():
            return program
        probe = run([*cxx, *flags, "-x", "c++", "-", "-o", str(folder / "probe")], input="int main() {}\n")
        if probe.returncode != 0:
            pytest.fail(f"{shlex.join(cxx)} has no {variant} sanitizer: {probe.stdout.strip()}")

        def compile_one(source: Path) -> Path:
            result = folder / f"{source.parent.name}_{source.stem}.o"
            done = run([*cxx, *flags, "-c", str(source), "-o", str(result)])
            assert done.returncode == 0, done.stdout
            return result

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(compile_one, sources(folder)))
        done = run([*cxx, *flags, *map(str, objects), "-o", str(program)])
        assert done.returncode == 0, done.stdout
        record.write_text(state.hexdigest())
        return program


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
    chosen = compiler()
    done = run([*chosen, "-x", "c", "-std=c11", *WARNINGS, "-fsyntax-only", str(SIM / "driver/driver.h")])
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("variant", VARIANTS)
def test_driver(variant: str) -> None:
    done = play(build(variant))
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d{2,} tests, 0 failures$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("scenario", ["exit_with_work_queued", "exit_while_hanging"])
@pytest.mark.parametrize("variant", ["address", "thread"])
def test_leaving_in_the_middle_of_work_is_clean(variant: str, scenario: str) -> None:
    done = play(build(variant), "scenario", scenario)
    assert (done.returncode, done.stdout) == (0, "leaving\n")


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
    "backplane sim: a synchronisation is missing: the host {} 0x[0-9a-f]+, byte {} of 64 in pinned memory that '{}' on "
    "stream 0 of card 0 {}, and has not waited for it"
)
WENT_ON = r"(.|\n)*^went on$"
HOST = r"^backplane sim: the host touched the device address 0x[0-9a-f]+: "


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
            r"the launch 'careless' touched the device address 0x[0-9a-f]+: byte 4 of "
            + ALLOCATION.format(bytes=4096, card=0)
            + r"A launch must translate device pointers",
        ),
        (
            "launch_uses_returned_memory",
            -signal.SIGSEGV,
            r"the launch 'late' touched memory of a card, .* not allocated: outside every segment of card 0",
        ),
        # Of pinned memory: the host may touch it when it has waited for the copy, not when the copy happens to be done.
        ("host_reads_what_a_copy_writes", 0, EARLY.format("touched", 3, "copy_d2h", "writes") + WENT_ON),
        ("host_writes_what_a_copy_reads", 0, EARLY.format("wrote", 3, "copy_h2d", "reads") + WENT_ON),
        ("host_is_told_and_goes_on", 0, EARLY.format("wrote", 3, "copy_h2d", "reads") + WENT_ON),
        *(
            (scenario, 0, r"^went on\n\n" + EARLY.format("wrote", 0, "copy_h2d", "reads") + r".*\n\Z")
            for scenario in ("neighbours_of_a_copy_are_the_hosts", "reads_beside_many_copies_are_the_hosts")
        ),
        # Whoever was there before is not robbed: of the device's faults they come second, of others first and only.
        ("previous_handler_follows", 42, r"(?s)the host touched .* 0 of .* on card 0.*the previous handler"),
        ("handler_comes_back_on_top", 42, r"(?s)the host touched .* on card 0.*the previous handler"),
        (
            "handlers_that_hand_back_do_not_take_turns_for_ever",
            -signal.SIGSEGV,
            r"\A\nbackplane sim: the host touched .* 0 of .* on card 0.*\na later handler\n\Z",
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
