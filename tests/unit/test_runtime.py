"""Tests the runtime of a process: one device object, loaded once, and options that are checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests import programs
from vllm_backplane import runtime as module
from vllm_backplane.errors import OptionError
from vllm_backplane.runtime import configured, runtime


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("BACKPLANE_DEVICE", raising=False)
    module.runtime.cache_clear()
    yield
    module.runtime.cache_clear()


def test_the_device_is_one_object_and_is_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_backplane.devices.cpu import CpuDevice

    loads = []
    monkeypatch.setattr(CpuDevice, "load", lambda self: loads.append(self))
    first = runtime()
    second = configured({"backplane": {"cpu": {"threads": 1}}})
    third = configured({})
    assert first.device is second.device is third.device
    assert loads == [first.device]


def test_a_configuration_changes_the_settings_of_that_device() -> None:
    assert runtime().device.settings["threads"] is None
    assert configured({"backplane": {"cpu": {"threads": 1}}}).device.settings["threads"] == 1
    assert configured({"backplane": {"memory_share": 0.25}}).setting("memory_share") == 0.25


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"backplane": None}, "give an object"),
        ({"backplane": []}, "give an object"),
        ({"Backplane": {}}, "did you mean 'backplane'"),
        ({"backplane": {"device": "other"}}, "BACKPLANE_DEVICE=other"),
        ({"backplane": {"patch_drift": "warn"}}, "BACKPLANE_PATCH_DRIFT"),
        ({"backplane": {"devise": "cpu"}}, "did you mean 'device'"),
        ({"backplane": {"cpu": {"thread": 1}}}, "did you mean 'threads'"),
        ({"backplane": {"memory_share": 2}}, "at most 1"),
    ],
)
def test_an_invalid_configuration_is_an_error(config: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        configured(config)


def test_other_sections_are_somebody_elses() -> None:
    assert configured({"someone": {"device": "x"}}).device.name == "cpu"
    assert configured(None).device.name == "cpu"


OVERRIDES = """
import inspect
from vllm.platforms.interface import Platform
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm_backplane.attention.backend import BackplaneAttentionBackend
from vllm_backplane.attention.implementation import BackplaneAttentionImpl
from vllm_backplane.attention.metadata import BackplaneMetadataBuilder
from vllm_backplane.distributed.communicator import BackplaneCommunicator
from vllm_backplane.platform import BackplanePlatform
from vllm_backplane.runner.v1 import BackplaneModelRunnerV1
from vllm_backplane.settings.compat import NOT_IN_EVERY_RELEASE
from vllm_backplane.worker.worker import BackplaneWorker

OWN = {  # methods that Backplane adds; every other method must override one of vLLM
    BackplaneWorker: {
        "_card",
        "_report_step",
        "_check_copies",
        "_recorded_forward",
        "_change_memory",
        "set_numeric_guard",
        "_index_on_host",
        "_workers_on_host",
        "_profile_activations",
        "_peak",
        "_peaks",
        "_check_kv_cache_size",
        "_models",
        "_terminating_on_failure",
        "_finish_output",
        "_run_step",
        "_clear_graphs",
        "_begin_weight_change",
        "_end_weight_change",
        "_preserved_parameters",
        "_fall_asleep",
        "_undo_sleep",
        "_wake",
        "_discard",
        "_sleep_pool",
        "_update_graph_suspension",
        "_begin_trace",
        "_end_trace",
        "_drop_ranges",
        "_drop_trace",
        "_trace_range",
        "modelled_seconds",
        "backplane_facts",
        "_log_modelled_time",
    },
    BackplaneModelRunnerV1: {
        "profile_step",
        "profile_forward",
        "warm_up",
        "_caches_to_zero",
        "_generators_of_partial_prefills_removed",
    },
    BackplaneAttentionImpl: {"_split_cache", "_scales", "do_kv_cache_update"},
    BackplaneCommunicator: {"_all_gatherv", "_checked_sizes", "_all2all"},
    BackplanePlatform: set(),
    BackplaneAttentionBackend: set(),
    BackplaneMetadataBuilder: set(),
}
gone = []
for ours, own in OWN.items():
    base = ours.__mro__[1]
    for name, value in vars(ours).items():
        if name.startswith("__") or not (callable(value) or isinstance(value, (classmethod, staticmethod, property))):
            continue
        is_newer = f"{base.__module__}:{base.__name__}.{name}" in NOT_IN_EVERY_RELEASE
        if name not in own and not hasattr(base, name) and not is_newer:
            gone.append(f"{ours.__name__}.{name}")
assert not gone, gone
"""


@pytest.mark.process
def test_every_override_overrides_something() -> None:
    run = programs.run(programs.command(OVERRIDES), timeout=120)
    assert run.returncode == 0, run.stderr
