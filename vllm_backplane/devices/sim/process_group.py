"""Implements a torch.distributed backend that copies device tensors to the host and uses gloo there.

A vendor's collective library would move memory from card to card. Simulated cards share no memory between processes, so
each operation is a copy to the host, gloo's operation there, and a copy back when the caller waits for it. Results
arrive in stream order: a kernel that is queued after the wait reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Tensors = list[torch.Tensor]

_c10d: Any = torch._C._distributed_c10d  # Any, because its type stubs are incomplete


class _Work(dist.Work):
    """Waits for Gloo operations in flight, and then calls a given function."""

    def __init__(self, works: list[dist.Work], staged: Any, finish: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._works = works
        self._staged = staged  # host memory that the operation reads and writes
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)
        self._works = []
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        self._staged = None
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return self.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        self.wait()
        future.set_result(None)
        return future


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy on the host, or the tensor itself if it is one already."""
    return tensor.cpu().contiguous()


def _empty_on_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _copy_back(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    """Returns a function that copies (target, source) pairs."""

    def copy() -> None:
        for target, source in pairs:
            if target is not source:
                target.copy_(source)

    return copy


class StagedProcessGroup(dist.ProcessGroup):
    """Runs the collectives of one group. It accepts host tensors too, because PyTorch itself sends some."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._backend = name
        self._group_name = self._group_desc = ""

    def getBackendName(self) -> str:
        return self._backend

    # PyTorch stores name and description in the backends of a group. This group has no backends, so it stores them.

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupDesc(self) -> str:
        return self._group_desc

    def setGroupDesc(self, description: str) -> None:
        self._group_desc = description

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:  # type: ignore[override]
        opts = opts or dist.BroadcastOptions()
        staged = [_to_host(tensor) if self.rank() == opts.rootRank else _empty_on_host(tensor) for tensor in tensors]
        return _Work([self._gloo.broadcast(staged, opts)], staged, _copy_back(list(zip(tensors, staged, strict=True))))

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:  # type: ignore[override]
        staged = [_to_host(tensor) for tensor in tensors]
        work = self._gloo.allreduce(staged, opts or dist.AllreduceOptions())
        return _Work([work], staged, _copy_back(list(zip(tensors, staged, strict=True))))

    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:  # type: ignore[override]
        opts = opts or dist.ReduceOptions()
        staged = [_to_host(tensor) for tensor in tensors]
        work = self._gloo.reduce(staged, opts)
        pairs = list(zip(tensors, staged, strict=True)) if self.rank() == opts.rootRank else []
        return _Work([work], staged, _copy_back(pairs))

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:  # type: ignore[override]
        staged_in = [_to_host(tensor) for tensor in inputs]
        staged_out = [[_empty_on_host(tensor) for tensor in row] for row in outputs]
        work = self._gloo.allgather(staged_out, staged_in, opts or _c10d.AllgatherOptions())
        pairs = [
            pair for row, staged in zip(outputs, staged_out, strict=True) for pair in zip(row, staged, strict=True)
        ]
        return _Work([work], (staged_in, staged_out), _copy_back(pairs))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        staged_in = _to_host(input)
        staged_out = torch.empty((self.size(), *input.shape), dtype=input.dtype)
        work = self._gloo.allgather([list(staged_out.unbind(0))], [staged_in], _c10d.AllgatherOptions())
        return _Work([work], (staged_in, staged_out), _copy_back([(output, staged_out.view(output.shape))]))

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:  # type: ignore[override]
        staged_in = [_to_host(tensor) for tensor in inputs]
        staged_out = [[_empty_on_host(tensor) for tensor in row] for row in outputs]
        work = self._gloo.gather(staged_out, staged_in, opts or dist.GatherOptions())
        pairs = [
            pair for row, staged in zip(outputs, staged_out, strict=True) for pair in zip(row, staged, strict=True)
        ]
        return _Work([work], (staged_in, staged_out), _copy_back(pairs))

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:  # type: ignore[override]
        staged_in = [[_to_host(tensor) for tensor in row] for row in inputs]
        staged_out = [_empty_on_host(tensor) for tensor in outputs]
        work = self._gloo.scatter(staged_out, staged_in, opts or dist.ScatterOptions())
        return _Work([work], (staged_in, staged_out), _copy_back(list(zip(outputs, staged_out, strict=True))))

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Reduces everything and keeps this rank's part, because gloo has no reduce_scatter for lists."""
        opts = opts or dist.ReduceScatterOptions()
        pairs, works, staged = [], [], []
        for output, pieces in zip(outputs, inputs, strict=True):
            wholes = [_to_host(piece) for piece in pieces]
            works += [self._gloo.allreduce([whole], _reduction(opts)) for whole in wholes]
            staged.append(wholes)
            pairs.append((output, wholes[self.rank()]))
        return _Work(works, staged, _copy_back(pairs))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        staged = _to_host(input)
        work = self._gloo.allreduce([staged], _reduction(opts or dist.ReduceScatterOptions()))
        piece = staged.view(self.size(), *output.shape)[self.rank()]
        return _Work([work], staged, _copy_back([(output, piece)]))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        staged_in, staged_out = _to_host(input), _empty_on_host(output)
        work = self._gloo.alltoall_base(
            staged_out, staged_in, output_sizes, input_sizes, opts or dist.AllToAllOptions()
        )
        return _Work([work], (staged_in, staged_out), _copy_back([(output, staged_out)]))

    # The names of these methods before PyTorch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        staged = [_to_host(tensor) for tensor in tensors]
        return _Work([self._gloo.send(staged, dst, tag)], staged)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        staged = [_empty_on_host(tensor) for tensor in tensors]
        return _Work([self._gloo.recv(staged, src, tag)], staged, _copy_back(list(zip(tensors, staged, strict=True))))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        staged = [_empty_on_host(tensor) for tensor in tensors]
        return _Work(
            [self._gloo.recv_anysource(staged, tag)], staged, _copy_back(list(zip(tensors, staged, strict=True)))
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        torch.accelerator.synchronize()
        return _Work([self._gloo.barrier(opts or dist.BarrierOptions())], None)


def _reduction(opts: Any) -> Any:
    reduction = dist.AllreduceOptions()
    reduction.reduceOp = opts.reduceOp
    reduction.timeout = opts.timeout
    return reduction


def register(name: str, device: str) -> None:
    """Registers the backend with torch.distributed as the default for tensors of the device."""

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StagedProcessGroup:
        return StagedProcessGroup(store, rank, size, timeout, name)

    dist.Backend.register_backend(name, create, devices=[device])
