"""Changes inputs at random: bytes, or the values of JSON documents. The random generator is seeded by the caller."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

INTERESTING = (0, 1, 2, 7, 8, 9, 31, 32, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 60, (1 << 64) - 1)
LONGEST = 1 << 14
"""Bytes of the longest changed input."""


def mutate_bytes(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Returns `data` after one to four changes: flipped bits, interesting numbers, removals, repetitions, splices."""
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(made) + 1)
        match chance.randrange(6):
            case 0 if made:
                made[min(at, len(made) - 1)] ^= 1 << chance.randrange(8)
            case 1:
                size = chance.choice((1, 4, 8))
                made[at : at + size] = (chance.choice(INTERESTING) % (1 << 8 * size)).to_bytes(size, "little")
            case 2:
                del made[at : at + chance.choice((1, 4, 8, 32))]
            case 3:
                made[at:at] = chance.randbytes(chance.choice((1, 4, 8)))
            case 4:
                made[at:at] = made[at : at + chance.choice((8, 16, 64))]
            case 5:
                other = chance.choice(others)
                begin = chance.randrange(len(other) + 1)
                made[at:] = other[begin:]
    return bytes(made[:LONGEST])


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 2**31 - 1, 2**31, -(2**63), 2**64, 10**30),
    *(0.0, -0.5, 1e-45, 1e308, float("inf"), float("nan")),
    *("", "x", "-1", "int8", "\ud800", "../..", "x" * 300),
    *("(a+)+$", "re:(.*)*x", "re:" + ".*" * 20 + "x", "(.|.)" * 30 + "Z", "re:" + ".?" * 30 + "Z"),
    *([], {}, [None], [[]], {"": None}, [1, "a", None]),
)
"""New values in JSON documents."""


def mutate_json(document: Any, chance: random.Random) -> Any:
    """Returns a JSON document after one to three changes: replaced, removed, added, repeated or nested values."""
    made = copy.deepcopy(document)
    for _ in range(chance.choice((1, 1, 2, 3))):
        holders = [one for one in _holders(made) if one]
        if not holders:
            return chance.choice(VALUES)
        holder = chance.choice(holders)
        place = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        match chance.randrange(5):
            case 0 | 1:
                holder[place] = copy.deepcopy(chance.choice(VALUES))
            case 2:
                del holder[place]
            case 3:
                holder[place] = [copy.deepcopy(holder[place])] * chance.choice((1, 2, 40))
            case 4 if isinstance(holder, dict):
                holder[chance.choice(("", "bits", "x" * 300, str(place) + "_", "dynamic"))] = holder[place]
            case _:
                holder[place] = {"": copy.deepcopy(holder[place])}
    return made


def _holders(document: Any) -> list[Any]:
    """Returns all objects and lists of a document."""
    found = []
    left = [document]
    while left:
        one = left.pop()
        if isinstance(one, (dict, list)):
            found.append(one)
            left += one.values() if isinstance(one, dict) else one
    return found


def mutate_json_bytes(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Returns the bytes of a JSON document, changed as a document in most cases, else as bytes."""
    if chance.random() < 0.25:
        return mutate_bytes(data, others, chance)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(data, others, chance)
    return json.dumps(mutate_json(document, chance)).encode()[:LONGEST]
