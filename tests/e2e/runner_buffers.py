"""Finds the buffers of vLLM's model runner, and shows which of them a call writes, reads or leaves as they are.

Buffers are found by walking from the runner to every tensor and array in the host's memory, not by a list of names: a
buffer that another vLLM adds takes part by itself. The walk enters vLLM's own objects, lists, tuples and dictionaries.
It leaves out, by their owner, what no preparation of a step writes: modules (the model and its weights),
configurations (which hold the layers), and KV caches. Graphs of steps belong to Backplane's objects, which the walk
does not enter.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy
import torch

Buffer = torch.Tensor | numpy.ndarray[Any, Any]
Contents = dict[str, bytes]
SCALARS = (int, float, str, bytes, type(None))


def find_buffers(runner: Any) -> dict[str, Buffer]:
    """Returns the buffers by the path from the runner, as `input_batch.block_table.block_tables.0.slot_mapping.gpu`.

    A buffer that has several names, as `np` and `cpu` of a CpuGpuBuffer, is found once.
    """
    found: dict[str, Buffer] = {}
    entered: set[int] = set()
    known: set[tuple[int, int]] = set()
    kv_caches = {cache.untyped_storage().data_ptr() for cache in _tensors(runner.kv_caches)}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, (torch.Tensor, numpy.ndarray)):
            if _is_on_host(value) and _storage(value) not in kv_caches and (place := _place(value)) not in known:
                known.add(place)
                found[name] = value
        elif not isinstance(value, SCALARS) and id(value) not in entered:
            entered.add(id(value))
            for part, one in _parts(value):
                visit(f"{name}.{part}" if name else str(part), one)

    visit("", runner)
    return found


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields what the walk visits next, with its name in `value`."""
    if isinstance(value, dict):
        yield from list(value.items())
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif _is_entered(type(value)):
        yield from list(getattr(value, "__dict__", {}).items())
        slots = [slot for each in type(value).__mro__ for slot in getattr(each, "__slots__", ())]
        for slot in dict.fromkeys([*slots, *getattr(value, "__struct_fields__", ())]):
            if hasattr(value, slot):
                yield slot, getattr(value, slot)


@cache
def _is_entered(kind: type) -> bool:
    if issubclass(kind, (type, enum.Enum, torch.nn.Module)):
        return False
    packages = [each.__module__.split(".") for each in kind.__mro__]
    return any(names[0] == "vllm" for names in packages) and packages[0][:2] != ["vllm", "config"]


def _is_on_host(buffer: Buffer) -> bool:
    if isinstance(buffer, numpy.ndarray):
        return buffer.size > 0 and not buffer.dtype.hasobject
    return buffer.device.type == "cpu" and buffer.layout == torch.strided and buffer.numel() > 0


def _storage(buffer: Buffer) -> int:
    return 0 if isinstance(buffer, numpy.ndarray) else buffer.untyped_storage().data_ptr()


def _place(buffer: Buffer) -> tuple[int, int]:
    if isinstance(buffer, numpy.ndarray):
        return buffer.__array_interface__["data"][0], buffer.nbytes
    return buffer.data_ptr(), buffer.nbytes


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def read(runner: Any) -> Contents:
    """Returns the contents of all buffers, bit by bit: values that are not numbers are equal to themselves."""
    return {name: _bytes(buffer) for name, buffer in find_buffers(runner).items()}


def differences(some: Contents, others: Contents) -> set[str]:
    """Returns the names of buffers that hold other values, or that only one of the two has."""
    return {name for name in some.keys() | others.keys() if some.get(name) != others.get(name)}


def _bytes(buffer: Buffer) -> bytes:
    if isinstance(buffer, numpy.ndarray):
        return buffer.tobytes()
    return buffer.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


class Saved:
    """Holds a copy of all buffers, and writes it back into them."""

    def __init__(self, runner: Any) -> None:
        self.buffers = find_buffers(runner)
        self._copies = {
            name: buffer.copy() if isinstance(buffer, numpy.ndarray) else buffer.clone()
            for name, buffer in self.buffers.items()
        }

    def restore(self, *names: str) -> None:
        """Writes the copies of the buffers `names` back, of all if none is named."""
        for name in names or self.buffers:
            self._write(name, self._copies[name])

    def invert(self, *names: str) -> None:
        """Writes 1 where a buffer holds 0, and 0 elsewhere: values that every index may have."""
        for name in names:
            self._write(name, self._copies[name] == 0)

    def _write(self, name: str, values: Any) -> None:
        buffer = self.buffers[name]
        if isinstance(buffer, torch.Tensor):
            buffer.copy_(values)
        elif buffer.flags.writeable:
            numpy.copyto(buffer, values, casting="unsafe")


def unread_buffers(runner: Any, call: Callable[[], Any]) -> set[str]:
    """Returns the buffers on which no other buffer depends after the call: those that it overwrites, and those that it
    does not use. The call is made once for each, and all buffers are as before in the end."""
    start, found = Saved(runner), set()
    call()
    plain = read(runner)
    for name in start.buffers:
        start.restore()
        start.invert(name)
        try:
            call()
        except Exception:  # what is read may make it fail
            continue
        if differences(plain, read(runner)) <= {name}:
            found.add(name)
    start.restore()
    return found
