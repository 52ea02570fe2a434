"""A loaded model's weights become those of another worker of the host where both have the same.

What is compared is what lies in memory when loading is over, whatever made it: copied from a checkpoint, put in another
order for the device, quantized. So nothing has to be known about a model or a format. Weights that no other worker
holds are moved to memory that the next one can map.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vllm_backplane.device import host
from vllm_backplane.errors import BackplaneError
from vllm_backplane.weights.sealed_memory import NotThere, Segment, aligned
from vllm_backplane.weights.shared_registry import Board, Offer

SMALLEST = 64 << 10
"""Smaller tensors are not worth a place of their own."""


@dataclass(slots=True)
class Outcome:
    """In bytes."""

    found: int = 0
    """Another worker held them."""
    placed: int = 0
    """Others will find them here."""
    own: int = 0
    """Too small."""
    kept: int = 0
    """Still in private memory as well: something else than the model holds on to them."""
    unreachable: list[str] = field(default_factory=list)
    """Why memory that was offered could not be mapped."""


@dataclass(slots=True)
class _Stored:
    """What one allocation holds, with the tensors that look at it."""

    tensors: list[torch.Tensor]
    owned: bool
    """By PyTorch's allocator: what came as an array of numpy is the array's, and may be read there. Asked when it is
    found, since looking at it as an array (`bytes().numpy()`) changes what PyTorch says."""
    digest: str = ""

    @property
    def storage(self) -> torch.UntypedStorage:
        return self.tensors[0].untyped_storage()

    def bytes(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(self.storage)

    def move(self, to: torch.Tensor) -> None:
        left, storage = self.storage, to.untyped_storage()
        for tensor in self.tensors:
            moved = torch.empty(0, dtype=tensor.dtype)
            tensor.data = moved.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        if self.owned:
            host.forget(left)


def share(model: torch.nn.Module, board: Board) -> Outcome:
    """As long as the model lives, others find its weights."""
    outcome = Outcome()
    stored, files = [], _mapped_files()
    for one in _allocations(model):
        size, place = one.storage.nbytes(), one.storage.data_ptr()
        if any(start <= place < end for start, end in files):
            continue
        if size < SMALLEST:
            outcome.own += size
        else:
            stored.append(one)
    with ThreadPoolExecutor(4) as pool:  # hashing lets go of Python's lock
        for one, digest in zip(stored, pool.map(_digest, stored), strict=True):
            one.digest = digest
    left = [weakref.ref(one.storage) for one in stored]
    with board.alone():
        segments = _adopt(stored, board.offers(), outcome)
        new = [one for one in stored if not any(one.digest in places for _, places in segments)]
        if new:
            segments.append(_place(new, outcome))
        if segments:
            note = board.put([Offer(0, segment.handle, places) for segment, places in segments])
            weakref.finalize(model, _withdraw, note, [segment for segment, _ in segments])
    host.give_unused_back()
    outcome.kept = sum(storage.nbytes() for storage in (reference() for reference in left) if storage is not None)
    return outcome


Held = tuple[Segment, dict[str, tuple[int, int]]]


def _adopt(stored: list[_Stored], offers: list[Offer], outcome: Outcome) -> list[Held]:
    """Maps what others hold. They may end before the next worker comes, so what was mapped is offered here too."""
    opened: list[Held] = []
    wanted = {one.digest: one for one in stored}
    for offer in offers:
        useful = {digest: place for digest, place in offer.places.items() if digest in wanted}
        if not useful:
            continue
        try:
            segment = Segment.held_by(offer.process, offer.handle)
        except NotThere as reason:
            outcome.unreachable.append(f"process {offer.process}: {reason}")
            continue
        for digest, (place, count) in useful.items():
            same = segment.bytes(place, count) if place + count <= segment.size else torch.empty(0)
            for one in (one for one in stored if one.digest == digest):
                if not torch.equal(same, one.bytes()):
                    raise BackplaneError(
                        f"process {offer.process} offers weights that are not what it says; end it, and start again"
                    )
                one.move(same)
                outcome.found += count
            del wanted[digest]
        opened.append((segment, useful))
    return opened


def _place(stored: list[_Stored], outcome: Outcome) -> Held:
    """One after another: each is given back before the next is written, so that at most one is in memory twice."""
    places: dict[str, tuple[int, int]] = {}
    size = 0
    for one in stored:
        if one.digest not in places:
            places[one.digest] = (size, one.storage.nbytes())
            size = aligned(size + one.storage.nbytes())
    segment = Segment.new(size)
    written: set[str] = set()
    for one in stored:
        place, count = places[one.digest]
        if one.digest not in written:
            segment.write(place, one.bytes().numpy().data)
            written.add(one.digest)
            outcome.placed += count
        one.move(segment.bytes(place, count))
    segment.seal()
    return segment, places


def _withdraw(note: Path, segments: list[Segment]) -> None:
    note.unlink(missing_ok=True)
    for segment in segments:
        segment.close()


def _allocations(model: torch.nn.Module) -> list[_Stored]:
    found: dict[int, _Stored] = {}
    seen: set[int] = set()
    for tensor in _tensors(model):
        if id(tensor) in seen or not tensor.is_cpu or tensor.layout != torch.strided or tensor.is_quantized:
            continue
        seen.add(id(tensor))
        storage = tensor.untyped_storage()
        if storage.nbytes():
            one = found.setdefault(storage.data_ptr(), _Stored([], storage.resizable()))
            one.owned &= storage.resizable()
            one.tensors.append(tensor)
    return list(found.values())


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and what layers keep beside them."""
    for module in model.modules():
        yield from (one for one in module._parameters.values() if one is not None)
        yield from (one for one in module._buffers.values() if one is not None)
        yield from (one for one in vars(module).values() if isinstance(one, torch.Tensor))


def _digest(one: _Stored) -> str:
    return hashlib.blake2b(one.bytes().numpy().data, digest_size=32).hexdigest()


def _mapped_files(listing: Path = Path("/proc/self/maps")) -> list[tuple[int, int]]:
    """Addresses of files, which the system shares by itself: such as the table of a GGUF file."""
    found = []
    for line in listing.read_text().splitlines():
        addresses, _, _, _, file, *_ = line.split()
        if file != "0":
            start, end = (int(text, 16) for text in addresses.split("-"))
            found.append((start, end))
    return found
