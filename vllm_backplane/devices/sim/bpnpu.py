"""Implements `torch.bpnpu`, the device module with the functions that PyTorch expects of an accelerator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Imported under a private name, because every public name of this module is part of `torch.bpnpu`.
from vllm_backplane.devices.sim import library as _sim

NAME = "bpnpu"

_Card = torch.device | int | str | None


def _index(card: _Card) -> int:
    if isinstance(card, int):
        return card
    if isinstance(card, str):
        card = torch.device(card)
    if card is None or card.index is None:
        return current_device()
    if card.type != NAME:
        raise ValueError(f"expected a {NAME} device, got {card}")
    return int(card.index)


# --- cards ----------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return bool(_sim.runtime("started")) and not _is_in_bad_fork()


def init() -> None:
    _sim.runtime("start")


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return bool(_sim.runtime("forked_after_start"))


def device_count() -> int:
    return int(_sim.runtime("card_count"))


def current_device() -> int:
    return int(_sim.runtime("current_card"))


def set_device(card: _Card) -> None:
    _sim.runtime("set_current_card", _index(card))


def _exchange_device(index: int) -> int:
    before = current_device()
    if index >= 0:
        set_device(index)
    return before


_maybe_exchange_device = _exchange_device


class device:
    """Makes a card the current one inside a `with` block."""

    def __init__(self, card: _Card) -> None:
        self.idx = _index(card)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _exchange_device(self.prev_idx)


class device_of(device):
    """Makes the card of a tensor the current one inside a `with` block; for a tensor elsewhere, nothing changes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == NAME else current_device())


def synchronize(card: _Card = None) -> None:
    """Waits for all work queued on a card."""
    _sim.synchronize(_index(card))


def get_device_name(card: _Card = None) -> str:
    return f"Backplane simulated NPU {_index(card)}"


@dataclass(frozen=True, slots=True)
class _DeviceProperties:
    name: str
    total_memory: int
    multi_processor_count: int


def get_device_properties(card: _Card = None) -> _DeviceProperties:
    """Returns the name, memory and compute units of a card; compute units are the host threads of one launch."""
    index = _index(card)
    threads = int(_sim.runtime("compute_threads"))
    return _DeviceProperties(get_device_name(index), _sim.memory_stats(index).limit, max(threads, 1))


def can_device_access_peer(card: _Card, peer: _Card) -> bool:
    """Returns whether memory is copied between two cards without the host, which holds for any two of a process."""
    one, other = _index(card), _index(peer)
    for index in (one, other):
        if not 0 <= index < device_count():
            raise ValueError(f"{NAME}:{index} does not exist; there are {device_count()} cards")
    return one != other


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16, torch.float32]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


# --- streams and events ---------------------------------------------------------------------------------------------


class Stream(torch.Stream):
    """Represents a stream of a card."""

    def __new__(cls, device: _Card = None, priority: int = 0, **given: Any) -> Stream:
        if given:  # an existing stream, by number
            return super().__new__(cls, **given)
        return super().__new__(cls, torch.device(NAME, _index(device)), priority=priority)


class _EventType(type):
    """Makes isinstance(event, Event) true for plain `torch.Event` objects of this device."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event) and instance.device.type == NAME


class Event(metaclass=_EventType):
    """Creates plain `torch.Event` objects of this device, because PyTorch measures time only between those."""

    def __new__(  # type: ignore[misc]
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> torch.Event:
        if interprocess:
            raise RuntimeError(f"events of {NAME} belong to one process")
        return torch.Event(NAME, enable_timing=enable_timing, blocking=blocking)


def current_stream(card: _Card = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(card))


def default_stream(card: _Card = None) -> torch.Stream:
    index = _index(card)
    kind = torch._C._autograd.DeviceType.PrivateUse1.value
    return torch.Stream(stream_id=0, device_index=index, device_type=int(kind))


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """Makes a stream the current one of its card inside a `with` block."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._before: torch.Stream | None = None
        self._card = -1

    def __enter__(self) -> torch.Stream | None:
        if self.stream is not None:
            self._card = current_device()
            self._before = current_stream(self.stream.device)
            torch.accelerator.set_stream(self.stream)
        return self.stream

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            torch.accelerator.set_stream(self._before)
            set_device(self._card)


def stream(stream: torch.Stream | None) -> StreamContext:
    return StreamContext(stream)


# --- memory ---------------------------------------------------------------------------------------------------------


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def memory_stats(card: _Card = None) -> dict[str, int]:
    """Returns the driver's statistics of a card's memory, also under the names that PyTorch's other devices use."""
    stats = _sim.memory_stats(_index(card))
    own = {field[0]: int(getattr(stats, field[0])) for field in stats._fields_}
    return {
        **own,
        "allocated_bytes.all.current": own["in_use"],
        "allocated_bytes.all.peak": own["in_use_peak"],
        "reserved_bytes.all.current": own["reserved"],
        "reserved_bytes.all.peak": own["reserved_peak"],
        "num_ooms": own["out_of_memory"],
    }


def memory_allocated(card: _Card = None) -> int:
    return _sim.memory_stats(_index(card)).in_use


def max_memory_allocated(card: _Card = None) -> int:
    return _sim.memory_stats(_index(card)).in_use_peak


def memory_reserved(card: _Card = None) -> int:
    return _sim.memory_stats(_index(card)).reserved


def max_memory_reserved(card: _Card = None) -> int:
    return _sim.memory_stats(_index(card)).reserved_peak


def reset_peak_memory_stats(card: _Card = None) -> None:
    init()
    _sim.driver("reset_peaks", _index(card))


def mem_get_info(card: _Card = None) -> tuple[int, int]:
    """Returns (free, total) bytes; memory that the allocator caches is not free, as elsewhere in PyTorch."""
    stats = _sim.memory_stats(_index(card))
    return stats.limit - stats.reserved, stats.limit


# --- random numbers -------------------------------------------------------------------------------------------------


def default_generator(card: _Card = None) -> torch.Generator:
    _sim.library()
    generator: torch.Generator = torch.ops.bpnpu.default_generator(_index(card))
    return generator


def get_rng_state(card: _Card = NAME) -> torch.Tensor:
    return default_generator(card).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(state: torch.Tensor, card: _Card = NAME) -> None:
    default_generator(card).set_state(state)


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    default_generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        default_generator(index).manual_seed(seed)


def seed() -> int:
    return default_generator().seed()


def initial_seed() -> int:
    return default_generator().initial_seed()


# --- counters -------------------------------------------------------------------------------------------------------


def launch_counters(card: _Card = None) -> dict[str, float]:
    """Returns how many launches, copies and graph launches a card has run, and its modelled busy time."""
    counted = _sim.counters(_index(card))
    return {field[0]: getattr(counted, field[0]) for field in counted._fields_}


def operators() -> dict[str, Any]:
    """Returns the calls of each operator since the start or the last reset: "launched", "waited", "fell_back"."""
    return _sim.operator_report()


def reset_operators() -> None:
    _sim.runtime("reset_counters")
