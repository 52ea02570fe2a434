"""Provides a folder among temporary files that only this user can read and write.

Every user can create files and links of any name among temporary files. What is found there is trusted only inside a
folder that belongs to this user and is closed to all others.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from vllm_backplane.errors import BackplaneError


def private_folder(remedy: str = "set TMPDIR to a folder of your own") -> Path:
    """Returns this user's folder among temporary files, and creates it if needed.

    Raises if the folder cannot be created, or if it belongs to another user or is open to others; `remedy` ends the
    message.
    """
    name = f"vllm-backplane-{os.getuid()}"
    try:
        folder = Path(tempfile.gettempdir(), name)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()  # a symbolic link must fail the check, whatever its target is
    except OSError as fault:
        raise BackplaneError(f"cannot create {name} among temporary files: {fault}; {remedy}") from fault
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise BackplaneError(f"{folder} is not a folder that only you can read and write; remove it, or {remedy}")
    return folder
