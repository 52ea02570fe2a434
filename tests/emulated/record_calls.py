"""Records every operator call of the CPU kernel tests, with the results of the references, for `replay_calls.cpp`.

    python record_calls.py FOLDER

It writes files of about 60 MB, 0.pt, 1.pt and so on, each a list of (operator, label, arguments, results, written
arguments, rtol, atol), and `schemas`, which has a line per operator. Calls with 8-bit floats are omitted, because
PyTorch cannot read them in C++.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

UNIT_TESTS = Path(__file__).resolve().parents[1] / "unit"
sys.path[:0] = [str(UNIT_TESTS / "devices"), str(UNIT_TESTS / "ops")]

import compare_cpu_kernels as comparisons  # noqa: E402
from operator_checks import written  # noqa: E402

from vllm_backplane.devices.cpu import native  # noqa: E402
from vllm_backplane.ops.operator import EXACT, Tolerance, declared  # noqa: E402

PART_BYTES = 60 << 20
NOT_CALLS = {"thread_counts", "refusals"}


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors(one)


def plain(value: Any) -> Any:
    """Returns a value that the C++ reader accepts: lists instead of tuples, and no views of empty storages."""
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() == 0:
        return torch.zeros(value.shape, dtype=value.dtype)
    # The whole storage is copied, because a call may write to the tensor and the copy must keep its strides.
    own = value.untyped_storage().clone()
    return torch.empty(0, dtype=value.dtype).set_(own, value.storage_offset(), value.size(), value.stride())


class Recorder:
    """Collects calls and writes them in parts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[Any] = []
        self.parts = self.bytes = self.total = self.left_out = 0

    def compare(
        self,
        operator: Any,
        args: tuple[Any, ...] | Callable[[], tuple[Any, ...]],
        label: str,
        bound: float = comparisons.FLOAT32_BOUND,
    ) -> Iterator[str]:
        """Replaces the function of the same name of the tests: records a call with the bounds of the test."""
        args = args() if callable(args) else args
        positions = written(operator)
        expected = comparisons.outcome(operator.reference, args, positions)
        everything = list(tensors([args, expected]))
        if any(one.is_floating_point() and one.dtype.itemsize == 1 for one in everything):
            self.left_out += 1
            return iter(())
        kind = expected[0].dtype
        tolerance = operator.tolerances.get(kind, EXACT)
        if kind == torch.float32 and tolerance.rtol > 0:
            tolerance = Tolerance(bound, bound)
        call = (operator.name, label, tuple(map(plain, args)), plain(expected), list(positions))
        self.calls.append((*call, float(tolerance.rtol), float(tolerance.atol)))
        self.bytes += sum(one.untyped_storage().nbytes() for one in everything)
        if self.bytes > PART_BYTES:
            self.flush()
        return iter(())

    def flush(self) -> None:
        torch.save(self.calls, self.folder / f"{self.parts}.pt")
        self.total += len(self.calls)
        self.calls, self.bytes, self.parts = [], 0, self.parts + 1


def main() -> None:
    torch.manual_seed(0)  # the tests use the same seed, and their bounds hold for its numbers
    recorder = Recorder(Path(sys.argv[1]))
    assert native.load(), "the CPU kernel library is not built; install the package first"
    comparisons.compare = recorder.compare
    for part in comparisons.PARTS:
        if part.__name__ not in NOT_CALLS:
            found = list(part())
            assert not found, found
    recorder.flush()
    schemas = (getattr(torch.ops.backplane, name).default._schema for name in declared())
    lines = [str(schema).removeprefix("backplane::") for schema in schemas]
    (recorder.folder / "schemas").write_text("\n".join(lines) + "\n")
    print(f"{recorder.total} calls; {recorder.left_out} with 8-bit floats omitted")


if __name__ == "__main__":
    main()
