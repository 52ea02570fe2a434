"""`torch.bpnpu`: the device module, with the surface that PyTorch and its users expect of an accelerator's."""

from __future__ import annotations

from typing import Any

import torch

from vllm_backplane.devices.sim.library import counters, driver, library, memory_stats, operator_report, runtime

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
        raise ValueError(f"a {NAME} device is needed, not {card}")
    return int(card.index)


# --- cards ----------------------------------------------------------------------------------------------------------


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return bool(runtime("started")) and not _is_in_bad_fork()


def init() -> None:
    runtime("start")


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return bool(runtime("forked_after_start"))


def device_count() -> int:
    return int(runtime("card_count"))


def current_device() -> int:
    return int(runtime("current_card"))


def set_device(card: _Card) -> None:
    runtime("set_current_card", _index(card))


def _exchange_device(index: int) -> int:
    before = current_device()
    if index >= 0:
        set_device(index)
    return before


_maybe_exchange_device = _exchange_device


class device:
    """Context manager: another card is the current one."""

    def __init__(self, card: _Card) -> None:
        self.idx = _index(card)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _exchange_device(self.prev_idx)


def synchronize(card: _Card = None) -> None:
    torch.accelerator.synchronize(_index(card))


def get_device_name(card: _Card = None) -> str:
    return f"Backplane simulated NPU {_index(card)}"


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16, torch.float32]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


# --- streams and events ---------------------------------------------------------------------------------------------


class Stream(torch.Stream):
    def __new__(cls, device: _Card = None, priority: int = 0, **given: Any) -> Stream:
        if given:  # an existing stream, by number
            return super().__new__(cls, **given)
        return super().__new__(cls, torch.device(NAME, _index(device)), priority=priority)


class _Events(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event) and instance.device.type == NAME


class Event(metaclass=_Events):
    """Makes plain `torch.Event` objects of this device: PyTorch measures time between no others."""

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
    """Context manager: another stream is the current one of its card."""

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


def memory_stats_as_dict(card: _Card = None) -> dict[str, int]:
    """The driver's own account of a card's memory."""
    stats = memory_stats(_index(card))
    return {field[0]: int(getattr(stats, field[0])) for field in stats._fields_}


def memory_allocated(card: _Card = None) -> int:
    return memory_stats(_index(card)).in_use


def max_memory_allocated(card: _Card = None) -> int:
    return memory_stats(_index(card)).in_use_peak


def memory_reserved(card: _Card = None) -> int:
    return memory_stats(_index(card)).reserved


def max_memory_reserved(card: _Card = None) -> int:
    return memory_stats(_index(card)).reserved_peak


def reset_peak_memory_stats(card: _Card = None) -> None:
    init()
    driver("reset_peaks", _index(card))


def mem_get_info(card: _Card = None) -> tuple[int, int]:
    """(free, total); what the cache keeps is not free, as elsewhere in PyTorch."""
    stats = memory_stats(_index(card))
    return stats.limit - stats.reserved, stats.limit


# --- random numbers -------------------------------------------------------------------------------------------------


def default_generator(card: _Card = None) -> torch.Generator:
    library()
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


# --- what ran -------------------------------------------------------------------------------------------------------


def launch_counters(card: _Card = None) -> dict[str, float]:
    counted = counters(_index(card))
    return {field[0]: getattr(counted, field[0]) for field in counted._fields_}


def operators() -> dict[str, Any]:
    """Calls by operator since the start or the last reset: "launched", "waited", "fell_back"."""
    return operator_report()


def reset_operators() -> None:
    runtime("reset_counters")
