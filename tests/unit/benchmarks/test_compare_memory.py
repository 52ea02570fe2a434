"""Measured memory includes that of child processes and its parts, and measured load excludes the time of children."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import memory as program
from benchmarks.compare import machine, memory

HELD = 200 * 2**20
PROGRAM = f"""
import subprocess, sys
child = "import time; held = b'x' * {HELD}; time.sleep(2)"
sys.exit(subprocess.run([sys.executable, "-c", child]).returncode)
"""


@pytest.mark.process
def test_the_peak_is_of_the_whole_tree() -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM])
    peak = memory.watch(process, 60)
    assert process.returncode == 0
    assert HELD < peak < 2 * HELD
    assert memory.tree_pss(process.pid) == 0


MIB = 2**20
HOLDING = """
import mmap, sys
anonymous, shared = mmap.mmap(-1, 50 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), mmap.mmap(-1, 20 << 20)
opened = open(sys.argv[1], "rb")
file = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
anonymous.write(bytes(50 << 20)), shared.write(bytes(20 << 20))
total = sum(file[::4096])
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.process
def test_parts_are_distinguished_and_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(bytes(30 * MIB))
    command = [sys.executable, "-c", HOLDING, str(weights)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        [found] = memory.tree_parts(child.pid)
        whole = memory.tree_pss(child.pid)
        monkeypatch.setattr(sys, "argv", ["memory", "--pid", str(child.pid), "--json"])
        program.main()
        monkeypatch.setattr(sys, "argv", ["memory", "--pid", str(child.pid)])
        program.main()
    least = {memory.OWN: 50, memory.SHARED: 20, memory.FILES: 30, memory.LIBRARIES: 0.1, memory.HEAP: 0.1}
    for part, size in least.items():
        assert size * MIB <= found.parts[part] < (size + 15) * MIB, part
    assert found.all == pytest.approx(whole, rel=0.02)
    assert 0 <= found.shared < found.all
    as_json, _, shown = capsys.readouterr().out.partition("]\n")
    [line] = json.loads(f"{as_json}]")
    assert line["all"] == sum(line["parts"].values()) == pytest.approx(whole, rel=0.02)
    assert f"({child.pid}) | all |" in shown and "| shared memory | 20 | 20 |" in shown
    assert memory.tree_parts(child.pid) == [], "the process has ended"


@pytest.mark.process
def test_what_was_held_at_the_peak_is_kept() -> None:
    process, recorder = subprocess.Popen([sys.executable, "-c", PROGRAM]), memory.PeakRecorder()
    peak = recorder(process, 60)
    assert sum(one.all for one in recorder.processes) == pytest.approx(peak, rel=0.05)
    assert len(recorder.processes) == 2
    assert recorder.processes[1].parts[memory.OWN] > HELD


@pytest.mark.process
def test_a_process_that_does_not_end_is_an_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            memory.watch(process, 0.3)
    finally:
        process.kill()
        process.wait()


@pytest.mark.process
def test_the_work_of_a_child_counts_as_ours_once_it_has_ended() -> None:
    work = "import time\nwhile time.process_time() < 1: pass\nprint(flush=True)\nimport sys; sys.stdin.read()"
    load = machine.OtherLoad()
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        # The machine was busy for a second that does not count as ours yet.
        assert machine._busy_seconds() - load.busy > 0.9
        assert machine._own_seconds() - load.own < 0.5
        assert load.share() > 0
    assert machine._own_seconds() - load.own > 0.9
