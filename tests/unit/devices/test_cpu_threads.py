"""Tests the threads and cores of a CPU worker, on machines whose topology is a folder of files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import ParallelConfig, VllmConfig

from vllm_backplane.config import refusals
from vllm_backplane.devices.cpu import CpuDevice, threads
from vllm_backplane.devices.cpu.threads import Machine, Share, binding, faults, share
from vllm_backplane.errors import OptionError
from vllm_backplane.host.cores import physical_cores
from vllm_backplane.runtime import configured, runtime

SET_BY_VLLM = "VLLM_OMP_NUM_THREADS_SET_BY_VLLM"


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv(SET_BY_VLLM, raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    runtime.cache_clear()  # its device has the settings of this test


def tree(root: Path, nodes: list[list[list[int]]]) -> Path:
    """Writes /sys/devices/system of a machine; `nodes` lists the cores of each node as lists of hardware threads."""
    for number, node in enumerate(nodes):
        (root / f"node/node{number}").mkdir(parents=True)
        listed = ",".join(str(cpu) for core in node for cpu in core)
        (root / f"node/node{number}/cpulist").write_text(f"{listed}\n")
        for core in node:
            for cpu in core:
                folder = root / f"cpu/cpu{cpu}/topology"
                folder.mkdir(parents=True)
                (folder / "thread_siblings_list").write_text(",".join(map(str, core)) + "\n")
    return root


def made(
    root: Path, nodes: list[list[list[int]]], quota: int | None = None, allowed: set[int] | None = None
) -> Machine:
    cpus = allowed or {cpu for node in nodes for core in node for cpu in core}
    return Machine(physical_cores(cpus, tree(root, nodes)), min(len(cpus), quota or len(cpus)))


def cpus_of(given: Share) -> set[int]:
    assert given.cpus is not None
    return set(given.cpus)


PLAIN = {count: [[[cpu] for cpu in range(count)]] for count in (1, 2, 4, 7, 8, 16)}
HYPERTHREADS = [[[cpu, cpu + 8] for cpu in range(8)]]
TWO_NODES = [[[cpu, cpu + 16] for cpu in range(8)], [[cpu, cpu + 16] for cpu in range(8, 16)]]
UNEVEN = [[[cpu] for cpu in range(6)], [[6], [7]]]


@pytest.mark.parametrize(
    ("nodes", "workers", "expected"),
    [
        (PLAIN[2], 1, 2),  # few: all of them
        (PLAIN[7], 1, 7),
        (PLAIN[8], 1, 7),  # many: one kept free
        (PLAIN[16], 2, 7),
        (PLAIN[8], 4, 2),  # few for each
        (PLAIN[4], 2, 2),
        (PLAIN[2], 4, 1),
        (HYPERTHREADS, 1, 7),  # not 15
        ([[[0, 1]]], 1, 2),  # a cloud's smallest: one core, both of its threads
        ([[[0, 2], [1, 3]]], 1, 2),
        (TWO_NODES, 1, 15),
        (TWO_NODES, 2, 7),
    ],
)
def test_physical_cores_are_divided_among_workers(
    nodes: list[list[list[int]]], workers: int, expected: int, tmp_path: Path
) -> None:
    machine = made(tmp_path, nodes)
    for index in range(workers):
        assert share(machine, index, workers, None, "auto").threads == expected


def test_a_quota_and_an_affinity_are_kept_to(tmp_path: Path) -> None:
    rationed = made(tmp_path / "quota", TWO_NODES, quota=6)
    assert share(rationed, 0, 1, None, "auto") == Share(6, None)
    # With a quota nothing is bound: all containers of a host would bind themselves to the same cores.
    assert [share(rationed, index, 2, None, "auto") for index in range(2)] == [Share(3, None)] * 2
    limited = made(tmp_path / "affinity", TWO_NODES, allowed={2, 3, 8, 9, 18})
    assert [core.cpus for core in limited.cores] == [(2, 18), (3,), (8,), (9,)]
    assert [cpus_of(share(limited, index, 2, None, "auto")) for index in range(2)] == [{2, 18, 3}, {8, 9}]


def test_one_worker_or_one_node_is_not_bound(tmp_path: Path) -> None:
    assert share(made(tmp_path / "two", PLAIN[2]), 0, 1, None, "auto") == Share(2, None)
    assert share(made(tmp_path / "sixteen", PLAIN[16]), 1, 2, None, "auto").cpus is None
    assert share(made(tmp_path / "nodes", TWO_NODES), 0, 1, None, "auto").cpus is None


@pytest.mark.parametrize("workers", [2, 4, 3])
def test_workers_on_two_nodes_get_cores_of_one_each(workers: int, tmp_path: Path) -> None:
    """Workers of tensor parallelism and of data-parallel replicas are numbered together, across the whole host."""
    machine = made(tmp_path, TWO_NODES)
    bound = [share(machine, index, workers, None, "auto") for index in range(workers)]
    node_of = {cpu: core.node for core in machine.cores for cpu in core.cpus}
    for one, each in enumerate(bound):
        assert each.cpus is not None and each.threads <= len(each.cpus) // 2
        assert len({node_of[cpu] for cpu in each.cpus}) == 1 or workers == 3
        for other in bound[one + 1 :]:
            assert other.cpus is not None and not each.cpus & other.cpus
    if workers == 2:
        assert cpus_of(bound[0]) == {*range(8), *range(16, 24)}


def test_nodes_of_different_sizes_are_cut_evenly(tmp_path: Path) -> None:
    machine = made(tmp_path, UNEVEN)
    assert [cpus_of(share(machine, index, 2, None, "auto")) for index in range(2)] == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert share(machine, 0, 16, None, "auto") == Share(1, None)


def test_a_system_without_topology_has_a_core_per_number(tmp_path: Path) -> None:
    assert [core.cpus for core in physical_cores({0, 1, 5}, tmp_path)] == [(0,), (1,), (5,)]


@pytest.mark.parametrize(
    ("option", "variables", "workers", "expected"),
    [
        (None, {"OMP_NUM_THREADS": "5"}, 1, 5),
        (None, {"OMP_NUM_THREADS": "5"}, 2, 4),  # the most that a worker takes
        (None, {"OMP_NUM_THREADS": "3"}, 2, 3),
        (None, {"OMP_NUM_THREADS": "1"}, 16, 1),
        (None, {"OMP_NUM_THREADS": "6,2"}, 2, 4),  # a list, for nested regions, is no number
        (None, {"OMP_NUM_THREADS": "5", SET_BY_VLLM: "1"}, 2, 4),
        (4, {}, 2, 4),
        (3, {"OMP_NUM_THREADS": "5"}, 2, 3),
        (1, {}, 16, 1),
    ],
)
def test_option_then_variable_then_share_of_the_cores(
    option: int | None,
    variables: dict[str, str],
    workers: int,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    machine = made(tmp_path, PLAIN[8])
    monkeypatch.setattr(threads, "this_machine", lambda: machine)
    device = CpuDevice({"threads": option, "bind": "auto"})
    device.place_worker(0, workers)
    torch.set_num_threads(7)
    device.prepare_worker(workers)
    assert torch.get_num_threads() == expected


def test_more_threads_than_cores_for_all_workers_are_refused(tmp_path: Path) -> None:
    machine = made(tmp_path, PLAIN[8])
    with pytest.raises(OptionError, match=r"cpu.threads is 5 for each of 2 workers.*8 cores.*at most 4"):
        share(machine, 1, 2, 5, "auto")
    with pytest.raises(OptionError, match=r"cpu.threads is 3 for each of 2 workers.*4 cores"):
        share(machine, 0, 2, 3, (0, 1, 2, 3))
    with pytest.raises(OptionError, match=r"cpu.bind names 2 cores for 3 workers"):
        share(machine, 0, 3, None, (0, 1))


def test_a_configuration_is_refused_before_workers_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replicas of data parallelism are counted too."""
    config = VllmConfig(parallel_config=ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="mp"))
    chosen = configured({})
    machine = made(tmp_path, PLAIN[8])
    monkeypatch.setattr(threads, "this_machine", lambda: machine)
    eight = replace(chosen, device=CpuDevice({**chosen.device.settings, "threads": 3}))
    refusals.refuse_unsupported(config, eight)
    config.parallel_config.data_parallel_size_local = 2
    with pytest.raises(OptionError, match=r"cpu.threads is 3 for each of 4 workers.*set at most 2"):
        refusals.refuse_unsupported(config, eight)


@pytest.mark.parametrize(("threads_", "variable"), [(9, None), (None, "64"), (64, "2")])
def test_threads_that_the_machine_does_not_have_are_named(
    threads_: int | None, variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    machine = made(tmp_path, PLAIN[8])
    [(what, remedy)] = faults(machine, threads_, "auto")
    name, count = ("cpu.threads", threads_) if threads_ else ("OMP_NUM_THREADS", 64)
    assert f"{name} is {count}, and this process may use 8 cores" in what
    assert "at most 8" in remedy


def test_as_many_threads_as_the_machine_has_are_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    machine = made(tmp_path, HYPERTHREADS)
    assert faults(machine, None, "auto") == faults(machine, 16, "off") == faults(machine, 3, (1, 9)) == ()
    assert [what for what, _ in faults(machine, None, (0, 16, 17))] == [
        "cpu.bind names 2 cores that this process may not use: 16-17"
    ]


def test_this_machine_refuses_threads_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls `configured`, as every vLLM process does."""
    with pytest.raises(OptionError, match=r"cpu\.threads is 5000, and this process may use"):
        configured({"backplane": {"cpu": {"threads": 5000}}})
    monkeypatch.setenv("OMP_NUM_THREADS", "5000")
    with pytest.raises(OptionError, match="OMP_NUM_THREADS is 5000"):
        configured(None)


def test_stated_cores_are_bound_and_divided(tmp_path: Path) -> None:
    machine = made(tmp_path, TWO_NODES)
    assert share(machine, 0, 1, None, (4, 5, 6)) == Share(3, frozenset({4, 5, 6}))
    assert share(machine, 0, 1, None, tuple(range(8))).threads == 8  # of cores that the user names, none is left free
    assert [cpus_of(share(machine, i, 2, None, (4, 20, 5, 21))) for i in range(2)] == [{4, 20}, {5, 21}]
    assert share(machine, 0, 2, None, "off") == Share(7, None)


@pytest.mark.parametrize(
    ("given", "parsed"), [("auto", "auto"), ("off", "off"), ("0-2,7", (0, 1, 2, 7)), ([3, 4], (3, 4)), ("5", (5,))]
)
def test_binding_is_read(given: Any, parsed: Any) -> None:
    assert binding(given) == parsed


@pytest.mark.parametrize("given", ["", "on", "3-1", "1-", "-1", "1,x", 7, None, [], [[1]]])
def test_a_binding_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="auto, off, or cores"):
        binding(given)


@pytest.mark.process
def test_binding_holds_for_threads_there_are_and_threads_to_come() -> None:
    """A process that is bound, for example by a container, also reports no more cores."""
    script = """
import os, threading, torch
from vllm_backplane.devices.cpu import threads
torch.set_num_threads(2)
torch.randn(2000, 2000).exp()
one = min(os.sched_getaffinity(0))
waiting = threading.Event()
threading.Thread(target=waiting.wait, daemon=True).start()
threads.bind(frozenset({one}))
threading.Thread(target=waiting.wait, daemon=True).start()
found = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
assert len(found) >= 3 and all(cpus == {one} for cpus in found), found
assert threads.this_machine().threads == 1 and threads.this_machine().cpus == {one}
assert threads.share(threads.this_machine(), 0, 1, None, "auto") == threads.Share(1, None)
[(problem, remedy)] = threads.faults(threads.this_machine(), 2, "auto")
assert "may use 1 core " in problem, problem
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=dict(os.environ), capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


def test_a_system_that_lists_its_cores_in_another_way_has_a_core_for_each(tmp_path: Path) -> None:
    (tmp_path / "cpu/cpu0/topology").mkdir(parents=True)
    (tmp_path / "cpu/cpu0/topology/thread_siblings_list").write_text("all\n")
    assert [core.cpus for core in physical_cores({0, 1}, tmp_path)] == [(0,), (1,)]


def test_a_system_that_rejects_binding_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with pytest.raises(OptionError, match=r"cores 0.*set cpu\.bind to off"):
        threads.bind(frozenset({0}))
