"""Implements sleep mode for host memory: pages go back to the system while the tensors keep their addresses.

PyTorch's CPU allocator has no pools. So a dispatch mode records the tensors that operators return while a pool is
active, and `release` lets the kernel drop the pages of those that are still alive (madvise). The pages stay mapped and
empty, so graphs and views that hold addresses stay valid. Contents that must survive are first written to an unnamed
file on a disk, which the system deletes when the process ends for any reason. Tensors smaller than SMALLEST keep their
memory.
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

from vllm_backplane.errors import BackplaneError
from vllm_backplane.host import host_memory
from vllm_backplane.host.memory_ledger import ledger

SMALLEST = 64 << 10
"""Bytes of the smallest storage that is released."""
IN_MEMORY = ("tmpfs", "ramfs")
"""File systems in memory: writing weights to them would release nothing."""


@dataclass(frozen=True, slots=True)
class Pages:
    """Describes whole pages inside a tensor's storage."""

    storage: weakref.ref[torch.UntypedStorage]
    storage_address: int
    """Address of the storage when the pages were dropped."""
    start: int
    length: int

    def are_valid(self) -> bool:
        """Returns whether the storage is still alive and at the same address."""
        storage = self.storage()
        return storage is not None and storage.data_ptr() == self.storage_address


@dataclass(frozen=True, slots=True)
class Mapping:
    """Describes a mapped address range of this process."""

    start: int
    end: int
    anonymous: bool
    """Whether it is private, writable memory that belongs to no file."""


class SleepPool:
    """Collects storages, and releases and restores them together."""

    def __init__(self, folder: Callable[[], Path]) -> None:
        """`folder` returns the folder for saved contents, or raises if there is none."""
        self._folder = folder
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._reservations: list[tuple[weakref.ref[Any], int]] = []
        self._saved: tuple[IO[bytes], list[Pages]] | None = None
        self._saved_bytes = 0

    def in_use(self) -> TorchDispatchMode:
        """Returns a context in which the tensors that this thread's operators return are added to the pool."""
        return _AddResults(self)

    def add(self, tensor: torch.Tensor) -> None:
        """Adds the storage of a tensor to the pool, if it is large enough."""
        storage = tensor.untyped_storage()
        if storage.nbytes() >= SMALLEST:
            self._storages[storage.data_ptr()] = weakref.ref(storage)

    def add_reservation(self, owner: Any, count: int) -> None:
        """Adds a reservation in the memory ledger, which lasts as long as `owner` lives."""
        self._reservations.append((weakref.ref(owner), count))

    def release(self, keep: bool) -> None:
        """Returns the pool's pages to the system; with `keep`, their contents are saved to a file first."""
        pages = list(self._pages())
        self._saved = (self._save(pages), pages) if keep and pages else None
        try:
            for one in pages:
                host_memory.drop_pages(one.start, one.length)
        except BaseException:
            self._read_back()
            raise
        self._saved_bytes = sum(one.length for one in pages) if keep else 0
        for count in self._live_reservations():
            ledger.cancel(count)

    def restore(self) -> None:
        """Reads the saved contents back and renews the reservations. It may be called again after it has failed."""
        free = host_memory.usable_memory().free - ledger.unwritten_bytes()
        wanted = self._saved_bytes + sum(self._live_reservations())
        if wanted > free:
            others = ledger.unwritten_bytes(of_others=True)
            beside = f" beside {others / 2**30:.2f} GiB that other processes have reserved" if others else ""
            raise BackplaneError(
                f"waking up needs {wanted / 2**30:.2f} GiB of memory, and {max(free, 0) / 2**30:.2f} GiB are free"
                f"{beside}; end other processes that use memory, and wake up again"
            )
        self._read_back()
        # All in one: were some renewed and another one refused, the next attempt would renew them twice.
        if count := sum(self._live_reservations()):
            remedy = "end other processes, and wake up again"
            # The pages are still mapped, so that a limit of the process itself leaves no room for them and needs none.
            ledger.reserve(count, purpose="a KV cache", remedy=remedy, free=lambda: host_memory.usable_memory().free)

    def _live_reservations(self) -> list[int]:
        return [count for owner, count in self._reservations if owner() is not None]

    def _pages(self) -> Iterator[Pages]:
        """Yields the anonymous whole pages of every storage that is alive."""
        mappings = own_mappings()
        for reference in self._storages.values():
            storage = reference()
            if storage is None:
                continue
            base = storage.data_ptr()
            first, last = host_memory.whole_pages(base, base + storage.nbytes())
            for start, end in anonymous_ranges(mappings, first, last):
                yield Pages(reference, base, start, end - start)

    def _save(self, pages: Sequence[Pages]) -> IO[bytes]:
        """Writes the contents of the pages to an unnamed file and returns it."""
        folder, count = self._folder(), sum(one.length for one in pages)
        try:
            file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # open until it is read back
            try:
                os.posix_fallocate(file.fileno(), 0, count)  # fails on a full disk before anything is written
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
                "BACKPLANE_CPU_SLEEP_FOLDER to a folder on another disk, or sleep at level 2, which saves no weights"
            ) from fault
        return file

    def _read_back(self) -> None:
        if self._saved is not None:
            file, pages = self._saved
            offset = 0
            for one in pages:
                if one.are_valid():
                    _fill(file, offset, one)
                offset += one.length
            file.close()
        self._saved, self._saved_bytes = None, 0


class _AddResults(TorchDispatchMode):
    """Adds the tensors that operators return to a pool."""

    def __init__(self, pool: SleepPool) -> None:
        super().__init__()
        self._pool = pool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            # A tensor subclass has no storage of its own; the plain tensors inside it are returned by operators too.
            if type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu" and not one.is_sparse:
                self._pool.add(one)
        return result


def own_mappings(listing: Path = Path("/proc/self/maps")) -> list[Mapping]:
    """Returns the mapped address ranges of this process, sorted by address."""
    found = []
    for line in listing.read_text().splitlines():
        addresses, rights, _, _, file, *_ = line.split()
        start, end = (int(text, 16) for text in addresses.split("-"))
        found.append(Mapping(start, end, rights.startswith("rw") and rights.endswith("p") and file == "0"))
    return found


def anonymous_ranges(mappings: Sequence[Mapping], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yields the (start, end) of anonymous memory between the addresses `first` and `last`.

    Pages of a file are left out: the system can reclaim them anyway, and other processes may share them.
    """
    index = bisect_right(mappings, first, key=lambda one: one.start) - 1
    for one in mappings[max(index, 0) :]:
        if one.start >= last:
            return
        start, end = max(first, one.start), min(last, one.end)
        if one.anonymous and start < end:
            yield start, end


def folder_on_disk(configured: str | None, mounts: Path = Path("/proc/self/mountinfo")) -> Path:
    """Returns the configured folder, or else the first folder for temporary files that is on a disk.

    Raises a BackplaneError if it cannot be used.
    """
    candidates = [configured] if configured else [tempfile.gettempdir(), "/var/tmp"]
    reasons = []
    for name in candidates:
        reason = unfit_reason(Path(name), mounts)
        if reason is None:
            return Path(name)
        reasons.append(f"{name} {reason}")
    raise BackplaneError(
        f"there is no folder for sleeping weights: {'; '.join(reasons)}. Set BACKPLANE_CPU_SLEEP_FOLDER to a folder on "
        "a disk"
    )


def unfit_reason(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Returns the reason why weights cannot be saved in a folder, or None if they can."""
    if not folder.is_dir():
        return "is not a folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "cannot be written to"
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text().splitlines():
        mounted, _, kind = line.partition(" - ")
        if mounted.split()[2] == number and kind.split()[0] in IN_MEMORY:
            return f"is in memory ({kind.split()[0]}), so no memory would be released"
    return None


def _view(pages: Pages) -> memoryview:
    return memoryview((ctypes.c_char * pages.length).from_address(pages.start)).cast("B")


def _fill(file: IO[bytes], offset: int, pages: Pages) -> None:
    """Reads the contents of the pages from an offset of the file."""
    view, position = _view(pages), offset
    while view:
        read = os.preadv(file.fileno(), [view], position)
        if read == 0:
            raise BackplaneError("the file with the saved weights has become shorter; start the server again")
        view, position = view[read:], position + read
