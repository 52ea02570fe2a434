"""Weights on large pages: a decode step reads all of them, and with pages of 4 KiB it waits for translations as well.

Linux gives large pages to memory that asks for them (transparent huge pages, `madvise`). Weights of one layer are
smaller than a large page and are allocated one by one, so the asking comes last, when all of them lie where they stay:
each stretch that holds a weight is turned into one page. Data keeps its address.
"""

from __future__ import annotations

import ctypes
import errno
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

_ADVISE_HUGE, _COLLAPSE = 14, 25  # of <linux/mman.h>; the second since Linux 6.1
_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def page_size() -> int:
    """Of a large page; 0 where the system has none."""
    try:
        return int(_SIZE_FILE.read_text()) if sys.platform == "linux" else 0
    except FileNotFoundError:
        return 0


def stretches(tensors: Iterable[torch.Tensor], size: int) -> list[int]:
    """Where the stretches of `size` bytes begin that hold some of the tensors' memory."""
    found: set[int] = set()
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.nbytes > 0:
            first = tensor.untyped_storage().data_ptr()
            last = first + tensor.untyped_storage().nbytes() - 1
            found.update(range(first // size, last // size + 1))
    return [index * size for index in sorted(found)]


def gather(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that were moved to large pages. Where a stretch is not all the process's own, where the system has no
    large page free or gives none, memory stays as it is; before Linux 6.1 the system gathers it later by itself."""
    size = page_size()
    if size == 0:
        return 0
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for address in stretches(tensors, size):
        if advise(address, size, _ADVISE_HUGE) != 0:
            continue
        if advise(address, size, _COLLAPSE) == 0:
            moved += size
        elif ctypes.get_errno() == errno.ENOMEM:
            break  # no large page is free
    return moved
