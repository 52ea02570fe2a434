"""Memory of the host that sleeps: its pages go back to the system, and the tensors keep their addresses.

PyTorch's allocator of the host has no pools. So what is allocated meanwhile is noted as operators return it, and a
release tells the kernel to drop the pages inside of those that are still alive (madvise): they stay mapped, empty, so
graphs and views that hold addresses stay good. What is to be kept is written to a file without a name first, on a disk:
it goes when the process does, whatever ends it. Tensors of less than SMALLEST stay where they are.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_backplane.device import host
from vllm_backplane.devices.cpu import memory_ledger
from vllm_backplane.errors import BackplaneError

SMALLEST = 64 << 10
IN_MEMORY = ("tmpfs", "ramfs")
"""File systems that give nothing back."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Whole pages inside of one tensor's memory."""

    storage: weakref.ref[torch.UntypedStorage]
    of: int
    """Where the tensor's memory began when they were dropped."""
    start: int
    length: int

    def are_still_its(self) -> bool:
        storage = self.storage()
        return storage is not None and storage.data_ptr() == self.of


@dataclass(frozen=True, slots=True)
class Mapping:
    start: int
    end: int
    anonymous: bool
    """Private memory of this process that may be written to; it is in no file."""


class SleepPool:
    """What is released and restored together."""

    def __init__(self, folder: Callable[[], Path]) -> None:
        """`folder` says where what is kept is to be written, or raises."""
        self._folder = folder
        self._noted: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._promised: list[tuple[weakref.ref[Any], int]] = []
        self._kept: tuple[IO[bytes], list[Pages]] | None = None
        self._asleep = 0
        """Bytes that are kept."""

    def in_use(self) -> TorchDispatchMode:
        """Tensors that this thread's operators return meanwhile are in the pool."""
        return _Notes(self)

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() >= SMALLEST:
            self._noted[storage.data_ptr()] = weakref.ref(storage)

    def note_promised(self, owner: Any, count: int) -> None:
        """Memory that becomes some when it is written to (memory_ledger.py), for as long as `owner` lives."""
        self._promised.append((weakref.ref(owner), count))

    def release(self, keep: bool) -> None:
        pages = list(self._pages())
        self._kept = (self._written(pages), pages) if keep and pages else None
        try:
            for one in pages:
                host.drop_pages(one.start, one.length)
        except BaseException:
            self._read_back()
            raise
        self._asleep = sum(one.length for one in pages) if keep else 0
        for count in self._alive_promises():
            memory_ledger.withdraw(count)

    def restore(self) -> None:
        """May be called again when it has failed."""
        free = host.host_memory().free - memory_ledger.unwritten()
        wanted = self._asleep + sum(self._alive_promises())
        if wanted > free:
            raise BackplaneError(
                f"waking takes {wanted / 2**30:.2f} GiB of memory, and {max(free, 0) / 2**30:.2f} GiB are free; end "
                "what else uses memory, and wake up again"
            )
        self._read_back()
        for count in self._alive_promises():
            memory_ledger.promise(count, host.host_memory().free)

    def _alive_promises(self) -> list[int]:
        return [count for owner, count in self._promised if owner() is not None]

    def _pages(self) -> Iterator[Pages]:
        """Of what is alive."""
        mappings = own_mappings()
        for reference in self._noted.values():
            storage = reference()
            if storage is None:
                continue
            base = storage.data_ptr()
            first, last = host.whole_pages(base, base + storage.nbytes())
            for start, end in anonymous_parts(mappings, first, last):
                yield Pages(reference, base, start, end - start)

    def _written(self, pages: Sequence[Pages]) -> IO[bytes]:
        folder, count = self._folder(), sum(one.length for one in pages)
        try:
            file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # until it is read back
            try:
                os.posix_fallocate(file.fileno(), 0, count)  # a full disk is found before anything is written
                for one in pages:
                    view = _view(one)
                    while view:
                        view = view[file.write(view) :]
            except BaseException:
                file.close()
                raise
        except OSError as fault:
            raise BackplaneError(
                f"weights of {count / 2**30:.2f} GiB cannot be written to {folder} ({fault}); make room there, set "
                "BACKPLANE_CPU_SLEEP_FOLDER to a folder on another disk, or sleep at level 2, which keeps none"
            ) from fault
        return file

    def _read_back(self) -> None:
        if self._kept is not None:
            file, pages = self._kept
            offset = 0
            for one in pages:
                if one.are_still_its():
                    _fill(file, offset, one)
                offset += one.length
            file.close()
        self._kept, self._asleep = None, 0


class _Notes(TorchDispatchMode):
    def __init__(self, pool: SleepPool) -> None:
        super().__init__()
        self._pool = pool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            # Subclasses hold others, which are noted themselves, or none.
            if type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu" and not one.is_sparse:
                self._pool.note(one)
        return result


def own_mappings(listing: Path = Path("/proc/self/maps")) -> list[Mapping]:
    """Of this process, in the order of addresses."""
    found = []
    for line in listing.read_text().splitlines():
        addresses, rights, _, _, file, *_ = line.split()
        start, end = (int(text, 16) for text in addresses.split("-"))
        found.append(Mapping(start, end, rights.startswith("rw") and rights.endswith("p") and file == "0"))
    return found


def anonymous_parts(mappings: Sequence[Mapping], first: int, last: int) -> Iterator[tuple[int, int]]:
    """What of the addresses from `first` to `last` is this process's own. Pages of a file are left to the system, which
    can take them back as it is, and other processes may share them."""
    place = bisect_right(mappings, first, key=lambda one: one.start) - 1
    for one in mappings[max(place, 0) :]:
        if one.start >= last:
            return
        start, end = max(first, one.start), min(last, one.end)
        if one.anonymous and start < end:
            yield start, end


def folder_on_disk(stated: str | None, mounts: Path = Path("/proc/self/mountinfo")) -> Path:
    """Where what is kept is written: the user's choice, or the first folder for temporary files that is on a disk."""
    candidates = [stated] if stated else [tempfile.gettempdir(), "/var/tmp"]
    reasons = []
    for name in candidates:
        reason = unfit(Path(name), mounts)
        if reason is None:
            return Path(name)
        reasons.append(f"{name} {reason}")
    raise BackplaneError(
        f"no folder for what sleeps: {'; '.join(reasons)}. Set BACKPLANE_CPU_SLEEP_FOLDER to a folder on a disk"
    )


def unfit(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Why nothing can be kept there, if so."""
    if not folder.is_dir():
        return "is no folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "cannot be written to"
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text().splitlines():
        mounted, _, kind = line.partition(" - ")
        if mounted.split()[2] == number and kind.split()[0] in IN_MEMORY:
            return f"is in memory ({kind.split()[0]}), so nothing would be given back"
    return None


def _view(pages: Pages) -> memoryview:
    return memoryview((ctypes.c_char * pages.length).from_address(pages.start)).cast("B")


def _fill(file: IO[bytes], offset: int, pages: Pages) -> None:
    view, place = _view(pages), offset
    while view:
        read = os.preadv(file.fileno(), [view], place)
        if read == 0:
            raise BackplaneError("the file that weights were kept in has become shorter; start the server again")
        view, place = view[read:], place + read
