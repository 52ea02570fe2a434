"""Options of the simulated NPU, and the driver's configuration made of them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from vllm_backplane.device import host
from vllm_backplane.devices.sim.library import Config, Model, default_config
from vllm_backplane.errors import OptionError
from vllm_backplane.settings.options import Option, byte_count, integer, one_of, text

MAX_CARDS = 16
MIN_MEMORY, MAX_MEMORY = 2 << 20, 8 << 40
"""Of a card; the driver takes no others."""
MAX_TIMEOUT = (2**32 - 1) // 1000
"""In seconds: the driver counts milliseconds in 32 bits."""
MAX_THREADS = 4096
RAM_SHARE = 0.5
"""Of the host's memory, for all cards together, where no size is given. Memory that is not written takes none."""

FALLBACK = ("forbid", "warn", "allow")
RACES = ("off", "report", "fail")
"""In the order of the driver's `bpsim_races`."""

FAULTS_REMEDY = "correct or unset BACKPLANE_SIM_FAULTS or sim.faults; csrc/sim/driver/driver_faults.h has the language"

_RATES = {
    "memory": "memory_bandwidth",
    "link": "link_bandwidth",
    "flops": "flop_rate",
    "overhead": "launch_overhead_ns",
}


def memory(value: Any) -> int:
    count = byte_count(value)
    if not MIN_MEMORY <= count <= MAX_MEMORY:
        raise ValueError("2MiB to 8TiB, such as 2GiB")
    return count


def model(value: Any) -> str:
    """Checked here, kept as text: it travels between processes."""
    parse_model(value)
    return str(value)


def parse_model(value: Any) -> Model:
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
            raise ValueError(f"{key} once: {expected}")
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
"""Taken by the driver when it starts, and not again in the same process."""

CARDS: Option[int] = Option(
    "cards",
    2,
    integer(1, MAX_CARDS),
    "Simulated cards; as a variable only, because it is needed before options are read.",
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
        "What an operator means that the card does not have: an error, or running it on the host with a copy there and "
        "back, with or without a warning.",
    ),
    Option(
        "faults",
        None,
        text,
        "Faults to inject, such as 'oom@alloc=17;hang@launch=300'; csrc/sim/driver/driver_faults.h has the language.",
    ),
    Option(
        "model",
        None,
        model,
        "A chip whose speed is to be modelled, such as memory=800e9,link=32e9,flops=100e12,overhead=3000 (bytes and "
        "operations per second, ns per launch). Only event times and counters follow it: nothing runs slower. "
        "docs/plug-your-npu.md says how to read them.",
    ),
    Option(
        "sync_timeout",
        8,
        integer(0, MAX_TIMEOUT),
        "Seconds after which waiting for a stream that finishes no launch is an error; 0: never. A single launch of a "
        "large model on a slow host may need more.",
    ),
    Option(
        "threads",
        None,
        integer(1, MAX_THREADS),
        "Host threads that one launch may use; default: cores divided among workers.",
    ),
    Option(
        "races",
        "off",
        one_of(*RACES),
        "Missing synchronisation between streams, and between copies and the host: not looked for, told on standard "
        "error, or an error. docs/plug-your-npu.md says what it finds.",
    ),
    Option("check_launches", 0, integer(0, 1), "1 checks at every launch that the memory it names is in use."),
)


def stated_cards() -> int:
    """How many cards there are, by the variable."""
    stated = os.environ.get(CARDS.variable("sim"), "")
    try:
        return CARDS.parse(stated) if stated else CARDS.default
    except ValueError as expected:
        raise OptionError(f"{CARDS.variable('sim')} is {stated!r}; expected {expected}. {CARDS.help}") from None


def visible_cards(count: int) -> tuple[int, ...]:
    """Numbers of the cards that this process may use, as CUDA_VISIBLE_DEVICES would say it."""
    stated = os.environ.get("BACKPLANE_VISIBLE_CARDS")
    if stated is None:
        return tuple(range(count))
    words = [word.strip() for word in stated.split(",") if word.strip()]
    if not all(word.isdigit() and int(word) < count for word in words) or len(set(words)) != len(words):
        raise OptionError(
            f"BACKPLANE_VISIBLE_CARDS is {stated!r}; expected different numbers below {count} with commas between "
            f"({CARDS.variable('sim')} says how many cards there are)"
        )
    return tuple(int(word) for word in words)


def card_memory(settings: Mapping[str, Any]) -> int:
    if settings["memory"] is not None:
        return int(settings["memory"])
    return int(host.host_memory().total * RAM_SHARE) // int(settings["cards"]) >> 21 << 21


def driver_config(settings: Mapping[str, Any]) -> Config:
    config = default_config()
    config.cards = len(visible_cards(stated_cards()))
    config.memory_bytes = card_memory(settings)
    config.sync_timeout_ms = settings["sync_timeout"] * 1000
    config.check_launches = settings["check_launches"]
    config.check_races = RACES.index(settings["races"])
    if settings["faults"]:
        config.faults = settings["faults"].encode()
    if settings["model"]:
        config.model = parse_model(settings["model"])
    return config
