"""Memory that processes of one host share: written once, then sealed, and mapped by each.

It is a file without a name (memfd), so it goes when the last process that maps it does, whatever ends them. Another
process finds it among the open files of one that holds it. The seal lets nobody write to it any more. Each maps it
privately: a page that a process writes to, as new weights are, becomes its own.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import torch

from vllm_backplane.errors import BackplaneError

NAME = "backplane-weights"
ALIGNMENT = 64
"""Of what is put into it: PyTorch's own for tensors of the host."""
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def aligned(place: int) -> int:
    return -(-place // ALIGNMENT) * ALIGNMENT


class NotThere(Exception):
    """No such memory: the process that was to have it has ended, or does not let others look."""


class Segment:
    def __init__(self, handle: int, size: int) -> None:
        self.handle, self.size = handle, size
        self._mapping = mmap.mmap(handle, size, access=mmap.ACCESS_COPY)

    @classmethod
    def new(cls, size: int) -> Segment:
        handle = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(handle, size)  # takes no memory yet: see `write`
            return cls(handle, size)
        except OSError as fault:
            os.close(handle)
            raise _missing(size, fault) from fault

    @classmethod
    def held_by(cls, process: int, handle: int) -> Segment:
        """The memory that another process has open under a number."""
        place = Path(f"/proc/{process}/fd/{handle}")
        try:
            if not os.readlink(place).startswith(f"/memfd:{NAME}"):
                raise NotThere(f"{place} is something else by now")
            own = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as fault:
            raise NotThere(str(fault)) from fault
        try:
            if not _is_sealed(own):
                raise NotThere(f"{place} is not sealed")
            return cls(own, os.fstat(own).st_size)
        except BaseException:
            os.close(own)
            raise

    def write(self, place: int, data: memoryview) -> None:
        """Takes the memory for this. By a call of the system, which says where there is none; writing to a mapping
        would end the process."""
        while data:
            try:
                done = os.pwrite(self.handle, data, place)
            except OSError as fault:
                raise _missing(data.nbytes, fault) from fault
            data, place = data[done:], place + done

    def seal(self) -> None:
        fcntl.fcntl(self.handle, fcntl.F_ADD_SEALS, SEALS)

    def bytes(self, place: int, count: int) -> torch.Tensor:
        """As long as it lives, the mapping does."""
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=count, offset=place)

    def close(self) -> None:
        """Others cannot find it here any more; what is mapped stays."""
        os.close(self.handle)


def _missing(size: int, fault: OSError) -> BackplaneError:
    return BackplaneError(
        f"{size / 2**20:.1f} MiB of memory for weights that workers share cannot be had ({fault}); free memory, or "
        "remove --load-format"
    )


def _is_sealed(handle: int) -> bool:
    return fcntl.fcntl(handle, fcntl.F_GET_SEALS) & SEALS == SEALS
