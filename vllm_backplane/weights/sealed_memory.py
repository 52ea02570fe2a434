"""Implements memory segments that processes of one host share: written once, then sealed, and mapped by each process.

A segment is an anonymous file (memfd), so the system frees it when the last process that maps it has ended, however it
ended. Another process opens the segment through /proc/PID/fd of a process that holds it. Once sealed, the segment
cannot be written. Each process maps it privately: a page that a process writes, as when it gets new weights, becomes
its own copy.
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
"""Alignment of tensors in a segment, in bytes: the one that PyTorch uses for host tensors."""
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def aligned(offset: int) -> int:
    """Returns the offset rounded up to the alignment."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


class SegmentUnavailable(Exception):
    """Reports that a segment cannot be opened: its process has ended, or this process may not inspect that one."""


class Segment:
    """Maps a shared memory segment privately into this process."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size
        self._mapping = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)

    @classmethod
    def create(cls, size: int) -> Segment:
        descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)  # `write` allocates the memory
            return cls(descriptor, size)
        except OSError as fault:
            os.close(descriptor)
            raise _out_of_memory(size, fault) from fault

    @classmethod
    def open(cls, pid: int, descriptor: int) -> Segment:
        """Opens the sealed segment that another process holds under a file descriptor. Raises SegmentUnavailable."""
        path = Path(f"/proc/{pid}/fd/{descriptor}")
        try:
            if not os.readlink(path).startswith(f"/memfd:{NAME}"):
                raise SegmentUnavailable(f"{path} is another file now")
            own = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as fault:
            raise SegmentUnavailable(str(fault)) from fault
        try:
            if not _is_sealed(own):
                raise SegmentUnavailable(f"{path} is not sealed")
            return cls(own, os.fstat(own).st_size)
        except BaseException:
            os.close(own)
            raise

    def write(self, offset: int, data: memoryview) -> None:
        """Writes data, which allocates its memory. A system call is used because it returns an error when memory runs
        out; a write to the mapping would kill the process."""
        while data:
            try:
                written = os.pwrite(self.descriptor, data, offset)
            except OSError as fault:
                raise _out_of_memory(data.nbytes, fault) from fault
            data, offset = data[written:], offset + written

    def seal(self) -> None:
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)

    def bytes(self, offset: int, count: int) -> torch.Tensor:
        """Returns a uint8 tensor over the mapping, which stays mapped as long as the tensor exists."""
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=count, offset=offset)

    def close(self) -> None:
        """Closes the descriptor, so that other processes cannot open the segment here. Existing mappings stay."""
        os.close(self.descriptor)


def _out_of_memory(size: int, fault: OSError) -> BackplaneError:
    return BackplaneError(
        f"{size / 2**20:.1f} MiB of memory for weights that workers share cannot be allocated ({fault}); free memory, "
        "or remove --load-format"
    )


def _is_sealed(descriptor: int) -> bool:
    return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
