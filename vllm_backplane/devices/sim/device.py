"""Defines `SimDevice`, which implements the device contract for the simulated NPU."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from ctypes import byref
from typing import Any, ClassVar

import torch

from vllm_backplane.device import Capabilities, CodeLayout, Device, MemoryInfo, Probe, Properties
from vllm_backplane.device.graph import Graph
from vllm_backplane.device.torch_version import require_same_torch
from vllm_backplane.devices.sim import library
from vllm_backplane.devices.sim.graphs import SimGraph
from vllm_backplane.devices.sim.library import driver, runtime
from vllm_backplane.devices.sim.settings import (
    CARDS,
    DRIVER_OPTIONS,
    FALLBACK,
    FAULTS_REMEDY,
    OPTIONS,
    card_count,
    card_memory,
    driver_config,
    visible_cards,
)
from vllm_backplane.devices.sim.sleep import Pool
from vllm_backplane.errors import BackplaneError, OptionError
from vllm_backplane.host import fork_safety
from vllm_backplane.host.cores import usable_cores
from vllm_backplane.settings.options import Option

TORCH_NAME = "bpnpu"
COLLECTIVES = "bpccl"


class SimDevice(Device):
    """Implements the simulated NPU. Its cards belong to one process."""

    name: ClassVar[str] = "sim"
    torch_type: ClassVar[str] = TORCH_NAME
    dispatch_key: ClassVar[str] = "PrivateUse1"
    priority: ClassVar[int] = -100  # below the cpu: it is for tests and used only on request
    collective_backend: ClassVar[str] = COLLECTIVES
    capabilities: ClassVar[Capabilities] = Capabilities(
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        kv_cache_dtypes=("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"),
        streams=True,
        graphs=True,
        graph_sizes=(1, 2, 4, 8, 16),  # few, because each is computed once at start, on the host's cores
        pinned_memory=True,
        sleep=True,
        profile_tokens=128,  # few, because the host's cores compute them
    )
    options: ClassVar[tuple[Option[Any], ...]] = OPTIONS
    _driver_settings: ClassVar[Mapping[str, Any]] = {}
    """The settings with which the driver of this process was configured."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(settings)
        self._pools: dict[tuple[str, int], Pool] = {}

    @classmethod
    def probe(cls) -> Probe:
        if not library.PATH.exists():
            return Probe(available=False, reason=f"{library.LIBRARY_NAME} was not built", remedy=library.REBUILD)
        try:
            count = len(visible_cards(card_count()))
        except OptionError as fault:
            return Probe(available=False, reason=str(fault), remedy="correct the variable")
        if count == 0:
            return Probe(
                available=False,
                reason=f"{cls.visible_cards_variable} selects no card",
                remedy=f"unset it, or select cards: {cls.visible_cards_variable}=0,1",
            )
        return Probe(available=True, count=count)

    # --- start ----------------------------------------------------------------------------------------------------

    def load(self) -> None:
        library.library()
        fork_safety.install()
        if torch._C._get_privateuse1_backend_name() != TORCH_NAME:
            from vllm_backplane.devices.sim import bpnpu, process_group

            torch.utils.rename_privateuse1_backend(TORCH_NAME)
            torch._register_device_module(TORCH_NAME, bpnpu)
            torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
            process_group.register(COLLECTIVES, TORCH_NAME)
        self._configure()

    def faulty_settings(self) -> tuple[tuple[str, str], ...]:
        found = []
        if self.settings["cards"] != card_count():
            found.append(
                (
                    f"sim.cards is {self.settings['cards']} in --additional-config, which is read too late for it",
                    f"set {CARDS.variable(self.name)} instead",
                )
            )
        try:
            driver("faults_check", (self.settings["faults"] or "").encode())
        except BackplaneError as fault:
            found.append((f"sim.faults is {self.settings['faults']!r}: {fault}", FAULTS_REMEDY))
        cards = len(visible_cards(card_count()))
        named = map(int, re.findall(r"\bcard=(\d+)", self.settings["faults"] or ""))
        found += [
            (f"sim.faults names card {card}, and there are {cards} cards, counted from 0", FAULTS_REMEDY)
            for card in named
            if card >= cards
        ]
        found += self._changed_driver_settings()
        return tuple(found)

    def _changed_driver_settings(self) -> Iterator[tuple[str, str]]:
        """Yields (problem, remedy) for settings that another engine of the process changes after the driver started."""
        if not runtime("started"):
            return
        for key, running in self._driver_settings.items():
            if self.settings[key] != running:
                yield (
                    f"sim.{key} is {self.settings[key]!r}, and the cards of this process were started with {running!r}",
                    "give all engines of a process the same value, or start this engine in a process of its own",
                )

    def _configure(self) -> None:
        runtime("set_fallback", FALLBACK.index(self.settings["fallback"]))
        if runtime("started"):
            return
        runtime("configure", byref(driver_config(self.settings)))
        runtime("set_compute_threads", self.settings["threads"] or usable_cores())
        SimDevice._driver_settings = {key: self.settings[key] for key in DRIVER_OPTIONS}

    def load_kernels(self) -> None:
        """Registers the C++ kernels of the cpu device, which compute behind launches, for operators that have one."""
        from vllm_backplane.devices.sim import convolution
        from vllm_backplane.ops.operator import declared
        from vllm_backplane.ops.resolution import has_kernel

        convolution.register(self.dispatch_key)
        if library.CPU_KERNELS.exists():
            require_same_torch(library.CPU_KERNELS, torch.__version__)
            torch.ops.load_library(str(library.CPU_KERNELS))
            for name in declared():
                if not has_kernel(name, self.dispatch_key):
                    runtime("launch_cpu_kernel", name.encode())

    def quantized_layout(self, bits: int) -> CodeLayout:
        if not library.CPU_KERNELS.exists():
            return super().quantized_layout(bits)
        kernels = ctypes.CDLL(str(library.CPU_KERNELS))
        return CodeLayout(kernels.backplane_cpu_quantized_width(), bool(kernels.backplane_cpu_quantized_signed()))

    def kernel_provider(self) -> str:
        return f"{library.CPU_KERNELS.name} behind {library.LIBRARY_NAME}"

    def problems(self) -> tuple[tuple[str, str], ...]:
        if library.CPU_KERNELS.exists():
            return ()
        return (
            (
                "the CPU kernel library was not built, so every operator runs on the simulated card as its reference",
                library.REBUILD,
            ),
        )

    def fallbacks(self) -> Mapping[str, int]:
        counts: dict[str, int] = library.operator_report()["fell_back"]
        return counts

    def check_copies(self) -> str | None:
        runtime("start")
        driver("check_copies", 1)
        return None

    def modelled_seconds(self, index: int = 0) -> float | None:
        if not self.settings["model"]:
            return None
        return library.counters(index).modelled_busy_ns / 1e9

    def prepare_worker(self, workers_on_host: int) -> None:
        _explain_stray_accesses()
        runtime("set_compute_threads", self.settings["threads"] or max(usable_cores() // workers_on_host, 1))

    # --- the card ---------------------------------------------------------------------------------------------------

    def set_current(self, index: int) -> None:
        self._configure()  # settings may have changed since load()
        runtime("set_current_card", index)
        _explain_stray_accesses()

    def synchronize(self) -> None:
        library.synchronize(runtime("current_card"))

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)  # seeds the host and every card

    def properties(self, index: int = 0) -> Properties:
        number = visible_cards(self.settings["cards"])[index]
        return Properties(name="Backplane simulated NPU", uuid=f"sim-{number}", compute_units=usable_cores())

    def wants_graphs(self) -> bool:
        return True  # a decode step is hundreds of launches, and Python needs more time for them than the card

    def new_graph(self, index: int = 0) -> Graph:
        return SimGraph(index)

    # --- memory -----------------------------------------------------------------------------------------------------

    def memory(self, index: int = 0) -> MemoryInfo:
        if not runtime("started"):  # a process that only queries may fork later, so the driver is not started here
            total = card_memory(self.settings)
            return MemoryInfo(total=total, free=total)
        now = library.memory_stats(index)
        return MemoryInfo(total=now.limit, free=now.limit - now.in_use)

    def own_memory(self, index: int = 0) -> int:
        return library.memory_stats(index).in_use if runtime("started") else 0

    def reset_peak_memory(self, index: int = 0) -> None:
        self.synchronize()
        driver("reset_peaks", index)

    def peak_memory(self, index: int = 0) -> int:
        return library.memory_stats(index).in_use_peak

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    def sleep_pool(self, tag: str, index: int = 0) -> AbstractContextManager[None]:
        if (tag, index) not in self._pools:
            self._pools[tag, index] = Pool(index)
        return self._pools[tag, index].in_use()

    def release(self, tag: str, keep: bool, index: int = 0) -> None:
        self._pools[tag, index].release(keep)

    def restore(self, tag: str, index: int = 0) -> None:
        self._pools[tag, index].restore()


def _explain_stray_accesses() -> None:
    """Installs the driver's signal handler again, which explains a crash when the host accesses a card's memory.

    A call of faulthandler.enable() after the driver started has replaced it. Python's traceback is still printed.
    """
    if runtime("started"):
        driver("install_fault_handler")
