"""What a device tells Backplane about itself.

`Device` has a working default for everything but its identity, its probe and its memory, so the smallest
useful device is about thirty lines (README, "Plug in a device"). A device computes through the
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
    """Whether the device can be used on this machine, and if not, why and what to do."""

    available: bool
    count: int = 0
    reason: str = ""
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.available and self.count < 1:
            raise ValueError("an available device has at least one card")
        if not self.available and not self.reason:
            raise ValueError("an unavailable device says why")


@dataclass(frozen=True, slots=True)
class Properties:
    """One card, as a user would recognise it."""

    name: str
    uuid: str
    compute_units: int


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Memory of one card in bytes. `free` is what a new allocation could really get."""

    total: int
    free: int

    @property
    def used(self) -> int:
        return self.total - self.free


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """How the codes of a quantized weight lie in memory for `quantized_linear`."""

    width: int = 16
    """Output features side by side: the width of a block."""
    signed: bool = False
    """Codes of 8 bits less 128, as int8, for instructions that multiply signed numbers."""

    def code_type(self, bits: int) -> torch.dtype:
        return torch.int8 if self.signed and bits == 8 else torch.uint8


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the hardware can do. The defaults claim nothing."""

    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    """In order of preference: with --dtype auto, vLLM uses the first for float32 checkpoints and for those whose own
    type is not among them."""
    kv_cache_dtypes: tuple[str, ...] = ("auto",)
    """vLLM's names of the KV-cache storage types that the device's operators can read and write."""
    streams: bool = False
    """Work is queued and the host does not wait (needs the torch device module's stream surface)."""
    graphs: bool = False
    """Launches can be recorded and replayed (needs `new_graph`). Decode steps are, where the user asks for it or the
    device wants it (`wants_graphs`)."""
    graph_sizes: tuple[int, ...] = ()
    """Numbers of sequences for which decode steps are captured if the user names none; empty: vLLM's own list."""
    capture_computes: bool = False
    """A capture computes what it records. Then steps are captured when they are first served, not at start, and one
    that cannot be a graph is served all the same."""
    triton: bool = False
    """Triton compiles for it, so vLLM's own Triton kernels and its second model runner can be used."""
    pinned_memory: bool = False
    sleep: bool = False
    """Memory can be given back and taken again at the same addresses (needs `sleep_pool`, `release` and `restore`)."""
    fork: bool = False
    """A process that has loaded the device, and computed with it, may be forked; then vLLM's processes start without
    importing everything anew."""
    host_memory: bool = False
    """Cards share the host's memory, so the workers of one host divide it among themselves."""
    profile_tokens: int | None = None
    """Tokens in the step that measures activation memory, if a largest step would take too long to compute."""
    default_memory_share: float = 0.9
    """Share of the free memory that weights and KV cache may take when the user names none."""


class Device(ABC):
    """An accelerator, as Backplane sees it."""

    name: ClassVar[str]
    """What users write in ``BACKPLANE_DEVICE``."""
    torch_type: ClassVar[str]
    """Type of its tensors: ``torch.device(torch_type, index)`` must be valid after `load`."""
    dispatch_key: ClassVar[str]
    """PyTorch's dispatch key for that type: CPU, CUDA, PrivateUse1."""
    priority: ClassVar[int] = 100
    """Of the available devices, the one with the highest priority is used."""
    collective_backend: ClassVar[str] = "gloo"
    """torch.distributed backend between its cards."""
    visible_cards_variable: ClassVar[str] = "BACKPLANE_VISIBLE_CARDS"
    """The environment variable that selects cards, as CUDA_VISIBLE_DEVICES does: where it names some, `probe` counts
    those alone, and index 0 is the first of them. The prefix BACKPLANE_ is ours."""
    ray_resource: ClassVar[str] = ""
    """Ray's resource name; empty means that Ray does not schedule this device."""
    capabilities: ClassVar[Capabilities] = Capabilities()
    options: ClassVar[tuple[Option[Any], ...]] = ()
    """Options of its own: key ``{"backplane": {name: {key: …}}}``, variable BACKPLANE_NAME_KEY."""
    communicator: ClassVar[str | None] = None
    """Qualified name of a communicator class, if the default over torch.distributed is not right."""
    model_runner: ClassVar[str | None] = None
    """Qualified name of a model-runner class, if the device must replace Backplane's. It is called with vLLM's
    configuration, the torch device and this object, and has what `runner/v1.py` adds to vLLM's runner."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        """`settings` holds the resolved values of `options`."""
        defaults = {option.key: option.default for option in self.options}
        self.settings: Mapping[str, Any] = {**defaults, **(settings or {})}

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Look, without side effects and without raising, whether this device can be used."""

    def load(self) -> None:
        """Make ``torch.device(torch_type)`` usable in this process. Called once, first."""

    def load_kernels(self) -> None:
        """Register operator implementations; what is not registered runs as its reference."""

    def kernel_provider(self) -> str:
        """Where the kernels come from, as `vllm-backplane ops` shows it."""
        return type(self).__module__

    def problems(self) -> tuple[tuple[str, str], ...]:
        """(what is degraded, remedy) pairs for `doctor`: it serves, but not as well as it could."""
        return ()

    def faulty_settings(self) -> tuple[tuple[str, str], ...]:
        """(what is wrong, remedy) pairs: settings that have a value they may have, and that the device cannot take as
        it is here. Asked before `load` and whenever settings have changed; serving refuses, and `doctor` tells."""
        return ()

    def modelled_seconds(self, index: int = 0) -> float | None:
        """How long a card would have been busy so far if it were the chip that the user described, on a device that
        models one; else None."""
        return None

    def fallbacks(self) -> Mapping[str, int]:
        """PyTorch operators that the device lacks and that ran on the host instead, with how often, in this process:
        for `vllm-backplane ops`, and a worker's last words. A device on which that can happen overrides this."""
        return {}

    def properties(self, index: int = 0) -> Properties:
        return Properties(name=self.name, uuid=f"{self.name}-{index}", compute_units=1)

    @abstractmethod
    def memory(self, index: int = 0) -> MemoryInfo:
        """Total and free memory of a card, right now."""

    def own_memory(self, index: int = 0) -> int:
        """What this process itself holds on a card; the rest of `used` is others'."""
        return self.memory(index).used

    def reset_peak_memory(self, index: int = 0) -> None:
        """Begin a new measurement for `peak_memory`."""

    def peak_memory(self, index: int = 0) -> int:
        """Highest `own_memory` since the last reset. While this is not overridden, a tenth of the allowed memory is
        kept for activations."""
        return self.own_memory(index)

    def arrange_linear(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The weight of a linear layer, [out, in], in the order in which `blocked_linear` is to read it: any
        tensor whose ``reshape(-1, in)`` begins with the weight's rows. None leaves it as it is."""
        return None

    def quantized_layout(self, bits: int) -> CodeLayout:
        """How `quantized_linear` is to find the codes of a weight of 8 or 4 bits."""
        return CodeLayout()

    def zeroed_bytes(self, count: int, index: int = 0) -> torch.Tensor:
        """Memory for the KV cache: `count` zero bytes (int8) on a card."""
        return torch.zeros(count, dtype=torch.int8, device=self.torch_device(index))

    def sleep_pool(self, tag: str, index: int = 0) -> AbstractContextManager[None]:
        """While it is active, memory that this thread allocates on a card belongs to the pool `tag`."""
        raise NotImplementedError(f"device {self.name!r} claims no sleep mode")

    def release(self, tag: str, keep: bool, index: int = 0) -> None:
        """Give a pool's memory back. Its tensors keep their addresses; `keep` says whether what they hold is to be
        there again after `restore`, or may be anything."""
        raise NotImplementedError(f"device {self.name!r} claims no sleep mode")

    def restore(self, tag: str, index: int = 0) -> None:
        """Take a released pool's memory again."""
        raise NotImplementedError(f"device {self.name!r} claims no sleep mode")

    def torch_device(self, index: int = 0) -> torch.device:
        return torch.device(self.torch_type, index)

    def set_current(self, index: int) -> None:
        """Make a card the current one of this thread."""

    def synchronize(self) -> None:
        """Wait until everything queued on the current card is done."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def wants_graphs(self) -> bool:
        """Whether decode steps are to be replayed if the user says nothing about it."""
        return False

    def new_graph(self, index: int = 0) -> Graph:
        """A graph of a card, yet to be captured."""
        raise NotImplementedError(f"device {self.name!r} claims no graphs")

    def empty_cache(self) -> None:
        """Give unused cached memory back."""

    def check_copies(self) -> str | None:
        """Compare, from now on, what arrives of every copy between host and card with what was sent (a checksum on each
        side). A copy that differs is an error that says so, raised at the latest by the next call that waits for the
        card, before anything computed with it is used. Returns None; or, where that is not done, the reason."""
        return "the device does not offer it (Device.check_copies)"

    def refuse_workers(self, workers_on_host: int) -> None:
        """Raise an OptionError where the settings do not allow so many workers on this host. Called when a
        configuration is made, before any of them is started."""

    def place_worker(self, index: int, workers_on_host: int) -> None:
        """Choose where the process of this worker runs, the `index`-th of its host. Called first of all in it: memory
        belongs to the cores that touch it first."""

    def prepare_worker(self, workers_on_host: int) -> None:
        """Set up the process that will compute: threads. Called after weights are loaded."""
