"""Moves a loaded model's weights into shared memory, or maps those that another worker of the host already holds.

Weights are compared in the layout that they have in memory after loading, by digest and then byte by byte, however they
came about: copied from a checkpoint, rearranged for the device, or quantized. So nothing has to be known about a model
or a format. Weights that no other worker holds are moved to a segment that the next worker can map.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vllm_backplane.errors import BackplaneError
from vllm_backplane.host import host_memory
from vllm_backplane.weights.sealed_memory import Segment, SegmentUnavailable, aligned
from vllm_backplane.weights.shared_registry import SegmentEntry, WeightsRegistry

MIN_SHARED_BYTES = 64 << 10
"""Smaller tensors stay in each worker's private memory."""


@dataclass(slots=True)
class SharingResult:
    """Counts how many bytes of a model's weights were shared, and how."""

    mapped: int = 0
    """Bytes mapped from segments of other workers."""
    placed: int = 0
    """Bytes moved to a new segment, which other workers can map."""
    private: int = 0
    """Bytes of tensors that are too small to be shared."""
    duplicated: int = 0
    """Bytes that are still in private memory too, because something besides the model refers to them."""
    unavailable: list[str] = field(default_factory=list)
    """Why registered segments could not be mapped."""


@dataclass(slots=True)
class _Allocation:
    """Describes one allocation of host memory, with all tensors of the model that view it."""

    tensors: list[torch.Tensor]
    owned: bool
    """Whether PyTorch's allocator owns the memory. Memory of a numpy array is the array's, and others may read it
    there. Recorded when the allocation is found, because a numpy view (`bytes().numpy()`) changes what PyTorch
    reports."""
    digest: str = ""

    @property
    def storage(self) -> torch.UntypedStorage:
        return self.tensors[0].untyped_storage()

    def bytes(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(self.storage)

    def move(self, target: torch.Tensor) -> None:
        """Makes all tensors view `target`, which has the same bytes, and gives the old memory back to the system."""
        old, storage = self.storage, target.untyped_storage()
        for tensor in self.tensors:
            moved = torch.empty(0, dtype=tensor.dtype)
            tensor.data = moved.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        if self.owned:
            host_memory.drop_unused_storage(old)


def share_weights(model: torch.nn.Module, registry: WeightsRegistry) -> SharingResult:
    """Shares the weights of a loaded model. They stay registered as long as the model exists."""
    result = SharingResult()
    allocations, files = [], _file_mappings()
    for allocation in _allocations(model):
        size, address = allocation.storage.nbytes(), allocation.storage.data_ptr()
        if any(start <= address < end for start, end in files):
            continue
        if size < MIN_SHARED_BYTES:
            result.private += size
        else:
            allocations.append(allocation)
    with ThreadPoolExecutor(4) as pool:  # hashing releases Python's global lock
        for allocation, digest in zip(allocations, pool.map(_digest, allocations), strict=True):
            allocation.digest = digest
    old = [weakref.ref(allocation.storage) for allocation in allocations]
    with registry.locked():
        segments = _map_existing(allocations, registry.entries(), result)
        new = [one for one in allocations if not any(one.digest in tensors for _, tensors in segments)]
        if new:
            segments.append(_place(new, result))
        if segments:
            file = registry.add([SegmentEntry(0, segment.descriptor, tensors) for segment, tensors in segments])
            weakref.finalize(model, _unregister, file, [segment for segment, _ in segments])
    host_memory.trim_heap()
    result.duplicated = sum(storage.nbytes() for storage in (reference() for reference in old) if storage is not None)
    return result


HeldSegment = tuple[Segment, dict[str, tuple[int, int]]]
"""A segment that this process has open, and the offset and size of each tensor in it, by digest."""


def _map_existing(
    allocations: list[_Allocation], entries: list[SegmentEntry], result: SharingResult
) -> list[HeldSegment]:
    """Maps the weights that other workers hold. Returns their segments, which this process registers too: the other
    workers may end before the next one starts."""
    opened: list[HeldSegment] = []
    wanted = {allocation.digest: allocation for allocation in allocations}
    for entry in entries:
        useful = {digest: place for digest, place in entry.tensors.items() if digest in wanted}
        if not useful:
            continue
        try:
            segment = Segment.open(entry.pid, entry.descriptor)
        except SegmentUnavailable as reason:
            result.unavailable.append(f"process {entry.pid}: {reason}")
            continue
        for digest, (offset, count) in useful.items():
            shared = segment.bytes(offset, count) if offset + count <= segment.size else torch.empty(0)
            for allocation in (one for one in allocations if one.digest == digest):
                if not torch.equal(shared, allocation.bytes()):
                    raise BackplaneError(
                        f"process {entry.pid} has registered weights that differ from their digest; terminate it, and "
                        "start again"
                    )
                allocation.move(shared)
                result.mapped += count
            del wanted[digest]
        opened.append((segment, useful))
    return opened


def _place(allocations: list[_Allocation], result: SharingResult) -> HeldSegment:
    """Moves weights to a new segment, one after another: each old copy is freed before the next one is written, so at
    most one is in memory twice."""
    tensors: dict[str, tuple[int, int]] = {}
    size = 0
    for allocation in allocations:
        if allocation.digest not in tensors:
            tensors[allocation.digest] = (size, allocation.storage.nbytes())
            size = aligned(size + allocation.storage.nbytes())
    segment = Segment.create(size)
    written: set[str] = set()
    for allocation in allocations:
        offset, count = tensors[allocation.digest]
        if allocation.digest not in written:
            segment.write(offset, allocation.bytes().numpy().data)
            written.add(allocation.digest)
            result.placed += count
        allocation.move(segment.bytes(offset, count))
    segment.seal()
    return segment, tensors


def _unregister(file: Path, segments: list[Segment]) -> None:
    file.unlink(missing_ok=True)
    for segment in segments:
        segment.close()


def _allocations(model: torch.nn.Module) -> list[_Allocation]:
    found: dict[int, _Allocation] = {}
    seen: set[int] = set()
    for tensor in _tensors(model):
        if id(tensor) in seen or not tensor.is_cpu or tensor.layout != torch.strided or tensor.is_quantized:
            continue
        seen.add(id(tensor))
        storage = tensor.untyped_storage()
        if storage.nbytes():
            allocation = found.setdefault(storage.data_ptr(), _Allocation([], storage.resizable()))
            allocation.owned &= storage.resizable()
            allocation.tensors.append(tensor)
    return list(found.values())


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yields the parameters and buffers of all layers, and tensors that layers keep as plain attributes."""
    for module in model.modules():
        yield from (one for one in module._parameters.values() if one is not None)
        yield from (one for one in module._buffers.values() if one is not None)
        yield from (one for one in vars(module).values() if isinstance(one, torch.Tensor))


def _digest(allocation: _Allocation) -> str:
    return hashlib.blake2b(allocation.bytes().numpy().data, digest_size=32).hexdigest()


def _file_mappings(listing: Path = Path("/proc/self/maps")) -> list[tuple[int, int]]:
    """Returns the address ranges of mapped files, such as a GGUF file. The system shares their pages already."""
    found = []
    for line in listing.read_text().splitlines():
        addresses, _, _, _, inode, *_ = line.split()
        if inode != "0":
            start, end = (int(text, 16) for text in addresses.split("-"))
            found.append((start, end))
    return found
