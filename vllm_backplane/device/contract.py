"""Defines `Device`, the interface that an accelerator implements, and its value types.

`Device` has a working default for everything but its identity, its probe and its memory, so the smallest
useful device is about thirty lines (docs/chip/first-token.md). A device computes through the
operators of `vllm_backplane.ops`; their references serve it until it registers kernels of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vllm_backplane.device.graph import Graph
from vllm_backplane.settings.options import Option


@dataclass(frozen=True, slots=True)
class Probe:
    """Reports whether the device can be used on this machine, and if not, why and what to do."""

    available: bool
    count: int = 0
    reason: str = ""
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.available and self.count < 1:
            raise ValueError("the probe of an available device must count at least one card")
        if not self.available and not self.reason:
            raise ValueError("the probe of an unavailable device must give a reason")


@dataclass(frozen=True, slots=True)
class Properties:
    """Describes one card by name and size, for reports."""

    name: str
    uuid: str
    compute_units: int


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Gives the memory of one card in bytes. `free` is the largest amount that new allocations can get."""

    total: int
    free: int
    reserved_by_others: int = 0
    """Bytes that other processes have reserved and not written yet. They are not part of `free`."""
    limit: str = ""
    """A limit of this process itself, for messages, such as `ulimit -v`. Limits of a container are part of `free`."""
    left_to_process: int | None = None
    """Bytes that this limit leaves to the process; None if there is no such limit."""

    @property
    def used(self) -> int:
        return self.total - self.free


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """Describes the memory layout of the codes of a quantized weight for `quantized_linear`."""

    width: int = 16
    """Number of output features in a block, which are interleaved in memory."""
    signed: bool = False
    """Whether 8-bit codes are stored as int8, with 128 subtracted, for instructions that multiply signed numbers."""

    def code_type(self, bits: int) -> torch.dtype:
        return torch.int8 if self.signed and bits == 8 else torch.uint8


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Describes the features of the hardware. By default there are none."""

    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    """Supported model dtypes in order of preference. With --dtype auto, vLLM uses the first one for float32 checkpoints
    and for checkpoints whose own dtype is not in this list."""
    kv_cache_dtypes: tuple[str, ...] = ("auto",)
    """vLLM's names of the KV-cache dtypes that the device's operators can read and write."""
    streams: bool = False
    """Whether work is queued and the host does not wait (requires streams in the torch device module)."""
    graphs: bool = False
    """Whether launches can be captured and replayed (requires `new_graph`). Decode steps are captured if the user
    requests it, or by default if `wants_graphs` returns true."""
    graph_sizes: tuple[int, ...] = ()
    """Batch sizes for which decode steps are captured if the user gives none; if empty, vLLM's own list is used."""
    capture_computes: bool = False
    """Whether a capture also computes what it records. If so, steps are captured when they are first served rather than
    at start, and a step that cannot be captured is still served."""
    triton: bool = False
    """Whether Triton compiles for the device, so that vLLM's Triton kernels and its V2 model runner can be used."""
    pinned_memory: bool = False
    """Whether PyTorch can allocate pinned host memory for the device."""
    sleep: bool = False
    """Whether memory can be released and restored at the same addresses (requires `sleep_pool`, `release` and
    `restore`)."""
    fork: bool = False
    """Whether a process may be forked after it has loaded the device and computed with it. vLLM's processes then start
    without importing everything again."""
    host_memory: bool = False
    """Whether the cards use the host's memory, so that the workers of one host divide it among themselves."""
    profile_tokens: int | None = None
    """Largest number of tokens in the short steps from which activation memory is extrapolated; None: the largest step
    is measured."""
    default_memory_share: float = 0.9
    """Fraction of the free memory that weights and KV cache may use if the user gives none."""


class Device(ABC):
    """Represents an accelerator. Its cards are numbered from 0; `index` is the number of a card."""

    name: ClassVar[str]
    """The name that users write in ``BACKPLANE_DEVICE``."""
    torch_type: ClassVar[str]
    """Device type of its tensors: ``torch.device(torch_type, index)`` must be valid after `load`."""
    dispatch_key: ClassVar[str]
    """PyTorch's dispatch key for that type: CPU, CUDA, PrivateUse1."""
    priority: ClassVar[int] = 100
    """If the user requests no device, the available one with the highest priority is used."""
    collective_backend: ClassVar[str] = "gloo"
    """torch.distributed backend between its cards."""
    visible_cards_variable: ClassVar[str] = "BACKPLANE_VISIBLE_CARDS"
    """Environment variable that selects cards, as CUDA_VISIBLE_DEVICES does. If it is set, `probe` counts only the
    selected cards, and index 0 is the first of them. The prefix BACKPLANE_ is reserved for Backplane."""
    ray_resource: ClassVar[str] = ""
    """Ray's resource name; empty means that Ray does not schedule this device."""
    capabilities: ClassVar[Capabilities] = Capabilities()
    options: ClassVar[tuple[Option[Any], ...]] = ()
    """The device's own options: key ``{"backplane": {name: {key: …}}}``, variable BACKPLANE_NAME_KEY."""
    communicator: ClassVar[str | None] = None
    """Qualified name of a communicator class that replaces the default one over torch.distributed."""
    model_runner: ClassVar[str | None] = None
    """Qualified name of a model-runner class that replaces Backplane's. It is called with vLLM's configuration, the
    torch device and this object. Besides the methods of vLLM's runner it must have those that the worker calls on
    Backplane's (`runner/v1.py`): `profile_step(tokens)`, `profile_forward(tokens)` and `warm_up()`."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        """Stores the resolved values of `options`; options that `settings` lacks have their defaults."""
        defaults = {option.key: option.default for option in self.options}
        self.settings: Mapping[str, Any] = {**defaults, **(settings or {})}

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Returns whether this device can be used. It has no side effects and never raises."""

    def load(self) -> None:
        """Makes ``torch.device(torch_type)`` usable in this process. It is called once, before all other methods."""

    def load_kernels(self) -> None:
        """Registers operator implementations. An operator without one runs as its reference."""

    def kernel_provider(self) -> str:
        """Returns where the kernels come from, for the table of `vllm-backplane ops`."""
        return type(self).__module__

    def problems(self) -> tuple[tuple[str, str], ...]:
        """Returns (problem, remedy) pairs for `doctor`: the device works, but slower or with fewer features."""
        return ()

    def faulty_settings(self) -> tuple[tuple[str, str], ...]:
        """Returns (problem, remedy) pairs of settings that are valid in general but not on this machine.

        It is called before `load` and after every change of the settings. A server does not start with such settings,
        and `doctor` reports them.
        """
        return ()

    def modelled_seconds(self, index: int = 0) -> float | None:
        """Returns how long a card would have been busy so far if it were the chip that the user described.

        Returns None on a device that models no chip.
        """
        return None

    def fallbacks(self) -> Mapping[str, int]:
        """Returns how often each PyTorch operator that the device lacks ran on the host instead, in this process.

        `vllm-backplane ops` shows it, and a worker logs it when it ends. A device that falls back to the host overrides
        this.
        """
        return {}

    def properties(self, index: int = 0) -> Properties:
        """Returns the name and size of a card."""
        return Properties(name=self.name, uuid=f"{self.name}-{index}", compute_units=1)

    @abstractmethod
    def memory(self, index: int = 0) -> MemoryInfo:
        """Returns the total memory of a card and the memory that is free now."""

    def own_memory(self, index: int = 0) -> int:
        """Returns the bytes that this process holds on a card; other processes hold the rest of `used`."""
        return self.memory(index).used

    def reset_peak_memory(self, index: int = 0) -> None:
        """Starts a new measurement for `peak_memory`."""

    def peak_memory(self, index: int = 0) -> int:
        """Returns the highest `own_memory` since the last reset. If a device does not override it, Backplane reserves
        what is measured, and at least a tenth of the allowed memory, for activations."""
        return self.own_memory(index)

    def arrange_linear(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Returns a linear layer's weight, [out, in], in the memory layout that `blocked_linear` is to read.

        It is a tensor whose ``reshape(-1, in)`` begins with the weight's rows. None leaves the weight unchanged.
        """
        return None

    def quantized_layout(self, bits: int) -> CodeLayout:
        """Returns the layout in which `quantized_linear` reads the codes of a weight of 8 or 4 bits."""
        return CodeLayout()

    def zeroed_bytes(self, count: int, index: int = 0) -> torch.Tensor:
        """Allocates memory for the KV cache: `count` zero bytes (int8) on a card."""
        return torch.zeros(count, dtype=torch.int8, device=self.torch_device(index))

    def read_memory(self, memory: torch.Tensor) -> bool:
        """Reads all bytes of a contiguous tensor on a card once, as fast as kernels can, and waits for the end.

        `vllm-backplane bench` measures the memory bandwidth with it. Returns False, and reads nothing, on a device that
        does not support it.
        """
        return False

    def sleep_pool(self, tag: str, index: int = 0) -> AbstractContextManager[None]:
        """Returns a context in which this thread's allocations on a card belong to the pool `tag`."""
        raise NotImplementedError(f"device {self.name!r} has no sleep mode")

    def release(self, tag: str, keep: bool, index: int = 0) -> None:
        """Releases the memory of a pool; its tensors keep their addresses.

        With `keep`, `restore` brings their contents back; without it, their contents are undefined afterwards.
        """
        raise NotImplementedError(f"device {self.name!r} has no sleep mode")

    def restore(self, tag: str, index: int = 0) -> None:
        """Allocates the memory of a released pool again, at the same addresses."""
        raise NotImplementedError(f"device {self.name!r} has no sleep mode")

    def torch_device(self, index: int = 0) -> torch.device:
        """Returns the torch device of a card."""
        return torch.device(self.torch_type, index)

    def set_current(self, index: int) -> None:
        """Makes a card the current one of this thread."""

    def synchronize(self) -> None:
        """Waits until all work queued on the current card is done."""

    def seed(self, seed: int) -> None:
        """Seeds the random numbers of the host and of every card."""
        torch.manual_seed(seed)

    def wants_graphs(self) -> bool:
        """Returns whether decode steps are captured and replayed if the user does not choose."""
        return False

    def new_graph(self, index: int = 0) -> Graph:
        """Returns a new graph of a card, not captured yet."""
        raise NotImplementedError(f"device {self.name!r} has no graphs")

    def empty_cache(self) -> None:
        """Returns the allocator's unused cached memory to the system."""

    def check_copies(self) -> str | None:
        """Verifies every copy between host and card from now on, by a checksum on each side.

        A difference is an error. It is raised at the latest by the next call that waits for the card, before a result
        computed from the copy is used. Returns None, or the reason why the device does not verify copies.
        """
        return "the device does not support it (Device.check_copies)"

    def refuse_workers(self, workers_on_host: int) -> None:
        """Raises an OptionError if the settings do not allow this number of workers on this host.

        It is called when a configuration is made, before any worker starts.
        """

    def place_worker(self, index: int, workers_on_host: int) -> None:
        """Binds the process of this worker, the `index`-th of its host, to cores.

        It is called first in the worker's process, because memory is allocated near the cores that touch it first.
        """

    def prepare_worker(self, workers_on_host: int) -> None:
        """Sets the number of threads of the worker's process. It is called after the weights are loaded."""
