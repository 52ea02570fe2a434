"""Declares Backplane's own options, and finds those that are at the wrong place in --additional-config.

It imports no device and no torch, so that the options can be checked before either is imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from vllm_backplane.peering.addresses import loopback_text
from vllm_backplane.settings.options import (
    SECTION,
    Option,
    boolean,
    fraction,
    group_size,
    integer,
    names,
    one_of,
    some_of,
    text,
)

OPTIONS: tuple[Option[Any], ...] = (
    Option(
        "device",
        None,
        text,
        "The device to run on. The variable chooses the device. --additional-config is read after the platform exists, "
        "so there the option is only checked: another device is an error.",
    ),
    Option(
        "memory_share",
        None,
        fraction,
        "Fraction of the device memory that is free at start that weights and KV cache may use; default: the device's "
        "own fraction, or --gpu-memory-utilization if that is given.",
    ),
    Option(
        "reference_ops",
        (),
        names,
        "Operators that run as plain-PyTorch references although the device has a kernel, or 'all'. Use it to find out "
        "whether a kernel computes wrong results.",
    ),
    Option(
        "numeric_guard",
        (),
        some_of("layers", "modules", "copies"),
        "Stops the engine at the first NaN, Inf or number beyond 1e30 in the output of a decoder layer (layers) or any "
        "module (modules) and names it; verifies copies between host and card (copies). Separate several with commas, "
        "or use 'all'. docs/chip/numeric-guard.md describes its cost and its limits.",
    ),
    Option(
        "quantization_group",
        None,
        group_size,
        "Number of weights that share a scale with --quantization int8 or int4: a multiple of 8, or 0 for a whole row; "
        "default: the format's own. docs/serve/quantization.md compares accuracy and speed.",
    ),
    Option(
        "weights_listen",
        None,
        loopback_text,
        "Address from which servers that start later may load the weights, such as 127.0.0.1:9100. Each worker uses a "
        "port of its own, counted up from this one. See docs/serve/weights-from-a-peer.md.",
    ),
    Option(
        "metrics",
        True,
        boolean,
        "Whether a server shows Backplane's metrics on /metrics, beside vLLM's. --disable-log-stats turns both off. "
        "docs/serve/metrics.md describes them.",
    ),
    Option(
        "operator_sampling",
        512,
        integer(0),
        "The time of operators is measured in one step of this number, for backplane:operator_seconds_total; 0: never. "
        "Such a step is not replayed from a graph.",
    ),
    Option(
        "patch_drift",
        "error",
        one_of("error", "warn"),
        "What happens when a part of vLLM that Backplane patches or overrides differs from the source that the code "
        "was written against: raise an error, or warn and go on. Patches are applied before --additional-config is "
        "read, so only the variable works.",
    ),
)


def misplaced_option(additional_config: Mapping[str, Any], devices: Collection[str]) -> str | None:
    """Returns an error text for a top-level key that was probably meant for Backplane's section, or None.

    Such a key is the name of an option or of one of the installed devices, or almost the name of the section.
    """
    own = {option.key for option in OPTIONS} | set(devices)
    for key in map(str, additional_config):
        if key == SECTION:
            continue
        if key in own:
            return (
                f"""--additional-config has {key!r} at its top level; write {{"{SECTION}": {{"{key}": …}}}} instead"""
            )
        if difflib.SequenceMatcher(a=key.lower(), b=SECTION).ratio() > 0.8:
            return f"--additional-config has a section {key!r}; did you mean {SECTION!r}?"
    return None
