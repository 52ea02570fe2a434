"""Declares the options of the simulated NPU and builds the driver's configuration from them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from vllm_backplane.devices.sim.library import Config, Model, default_config
from vllm_backplane.errors import OptionError
from vllm_backplane.host import host_memory
from vllm_backplane.settings.options import Option, byte_count, integer, one_of, text

MAX_CARDS = 16
MIN_MEMORY, MAX_MEMORY = 2 << 20, 8 << 40
"""Bounds of a card's memory, as the driver accepts them."""
MAX_TIMEOUT = (2**32 - 1) // 1000
"""Longest timeout in seconds; the driver stores milliseconds in 32 bits."""
MAX_THREADS = 4096
RAM_SHARE = 0.5
"""Default memory of all cards together, as a fraction of the host's. Card memory uses host memory only once written."""

FALLBACK = ("forbid", "warn", "allow")
RACES = ("off", "report", "fail")
"""Values of the option, in the order of the driver's `bpsim_races`."""

FAULTS_REMEDY = (
    "correct or unset BACKPLANE_SIM_FAULTS or sim.faults; csrc/sim/driver/driver_faults.h describes the syntax"
)

_RATES = {
    "memory": "memory_bandwidth",
    "link": "link_bandwidth",
    "flops": "flop_rate",
    "overhead": "launch_overhead_ns",
}


def memory(value: Any) -> int:
    """Parses the memory of a card."""
    count = byte_count(value)
    if not MIN_MEMORY <= count <= MAX_MEMORY:
        raise ValueError("2MiB to 8TiB, such as 2GiB")
    return count


def model(value: Any) -> str:
    """Checks the description of a chip and returns it as text, which can be passed between processes."""
    parse_model(value)
    return str(value)


def parse_model(value: Any) -> Model:
    """Parses the description of a chip."""
    expected = "memory=B/s,link=B/s,flops=FLOP/s,overhead=ns with numbers, such as memory=800e9,flops=100e12"
    chip = Model(on=1)
    if not isinstance(value, str) or not value:
        raise ValueError(expected)
    seen = set()
    for part in value.split(","):
        key, separator, number = part.partition("=")
        key = key.strip()
        if not separator or key not in _RATES:
            raise ValueError(expected)
        if key in seen:
            raise ValueError(f"{key} only once: {expected}")
        seen.add(key)
        try:
            rate = float(number)
        except ValueError:
            raise ValueError(expected) from None
        if not (math.isfinite(rate) and rate >= 0):
            raise ValueError(expected)
        setattr(chip, _RATES[key], rate)
    return chip


DRIVER_OPTIONS = ("memory", "faults", "model", "sync_timeout", "races", "check_launches")
"""Options that the driver reads when it starts, and never again in the same process."""

CARDS: Option[int] = Option(
    "cards",
    2,
    integer(1, MAX_CARDS),
    "Number of simulated cards. Only the variable works, because the number is needed before --additional-config is "
    "read.",
)

OPTIONS: tuple[Option[Any], ...] = (
    CARDS,
    Option(
        "memory",
        None,
        memory,
        f"Memory of each card, such as 2GiB; default: {RAM_SHARE:.0%} of the host's, divided among the cards.",
    ),
    Option(
        "fallback",
        "warn",
        one_of(*FALLBACK),
        "What happens with an operator that the card does not have: an error (forbid), or it runs on the host, with "
        "copies there and back, with a warning (warn) or without (allow).",
    ),
    Option(
        "faults",
        None,
        text,
        "Faults to inject, such as 'oom@alloc=17;hang@launch=300'; csrc/sim/driver/driver_faults.h describes the "
        "syntax.",
    ),
    Option(
        "model",
        None,
        model,
        "A chip whose speed is modelled, such as memory=800e9,link=32e9,flops=100e12,overhead=3000 (bytes and "
        "operations per second, ns per launch). Only event times and counters follow the model; nothing runs slower. "
        "docs/chip/simulated-npu.md explains how to read them.",
    ),
    Option(
        "sync_timeout",
        8,
        integer(0, MAX_TIMEOUT),
        "Seconds after which it is an error to wait for a stream that finishes no launch; 0: never. A single launch of "
        "a large model on a slow host may need more.",
    ),
    Option(
        "threads",
        None,
        integer(1, MAX_THREADS),
        "Host threads that one launch may use; default: the cores, divided among the workers.",
    ),
    Option(
        "races",
        "off",
        one_of(*RACES),
        "What happens with missing synchronization between streams, or between copies and the host: it is not detected "
        "(off), printed to standard error (report), or an error (fail). docs/chip/simulated-npu.md explains what is "
        "found.",
    ),
    Option("check_launches", 0, integer(0, 1), "1 checks at every launch that its memory is allocated."),
)


def card_count() -> int:
    """Returns the number of cards, from the variable or by default."""
    value = os.environ.get(CARDS.variable("sim"), "")
    try:
        return CARDS.parse(value) if value else CARDS.default
    except ValueError as expected:
        raise OptionError(f"{CARDS.variable('sim')} is {value!r}; expected {expected}. {CARDS.help}") from None


def visible_cards(count: int) -> tuple[int, ...]:
    """Returns the numbers of the cards that this process may use; the variable works like CUDA_VISIBLE_DEVICES."""
    value = os.environ.get("BACKPLANE_VISIBLE_CARDS")
    if value is None:
        return tuple(range(count))
    words = [word.strip() for word in value.split(",") if word.strip()]
    if not all(word.isdigit() and int(word) < count for word in words) or len(set(words)) != len(words):
        raise OptionError(
            f"BACKPLANE_VISIBLE_CARDS is {value!r}; expected different numbers below {count}, separated by commas "
            f"({CARDS.variable('sim')} sets the number of cards)"
        )
    return tuple(int(word) for word in words)


def card_memory(settings: Mapping[str, Any]) -> int:
    """Returns the bytes of a card's memory; the default is a multiple of 2 MiB."""
    if settings["memory"] is not None:
        return int(settings["memory"])
    return int(host_memory.usable_memory().total * RAM_SHARE) // int(settings["cards"]) >> 21 << 21


def driver_config(settings: Mapping[str, Any]) -> Config:
    """Returns the driver's configuration for the settings."""
    config = default_config()
    config.cards = len(visible_cards(card_count()))
    config.memory_bytes = card_memory(settings)
    config.sync_timeout_ms = settings["sync_timeout"] * 1000
    config.check_launches = settings["check_launches"]
    config.check_races = RACES.index(settings["races"])
    if settings["faults"]:
        config.faults = settings["faults"].encode()
    if settings["model"]:
        config.model = parse_model(settings["model"])
    return config
