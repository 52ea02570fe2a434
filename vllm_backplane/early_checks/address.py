"""Checks that the server can listen on its address, and reports which process has the port."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from vllm_backplane.errors import UsageError, short_repr

_SHOWN = 60
"""Characters of a command line in a message."""


def require_free(host: str, port: int, *, shared: bool = False) -> None:
    """Raises UsageError if this process cannot listen on the address. `shared` is for several API servers."""
    family = socket.AF_INET6 if _is_ipv6(host) else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            trial.bind((host, port))
    except OverflowError:
        raise UsageError(f"--port is {port}, which is not a port number (1 to 65535)") from None
    except (OSError, TypeError, UnicodeError) as fault:  # the last two are for a text that no name can have
        raise UsageError(_explanation(fault, host, port)) from None


def _explanation(fault: Exception, host: str, port: int) -> str:
    place = f"port {port} of {host}" if host else f"port {port}"
    if isinstance(fault, socket.gaierror) or not isinstance(fault, OSError):
        reason = getattr(fault, "strerror", fault)
        return f"--host {short_repr(host)} is not an address or a known name ({reason}); try 127.0.0.1"
    if fault.errno == errno.EADDRINUSE:
        return f"{place} is in use by {_owner(port)}; stop it, or choose another port with --port"
    if fault.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine; use 127.0.0.1, or 0.0.0.0 for all of its addresses"
    if fault.errno == errno.EACCES:
        return f"{place} needs the privileges of root; choose a port of 1024 or more with --port"
    return f"the server cannot listen on {place}: {fault.strerror}; change --host or --port"


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def _owner(port: int) -> str:
    """Describes the process that listens on a port, as far as this user may know."""
    import psutil  # late: it is needed for the message only

    try:
        found = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    except (psutil.Error, OSError):
        found = []
    numbers = sorted({each.pid for each in found if each.laddr and each.laddr.port == port and each.pid is not None})
    if not numbers:
        return "a process of another user"
    try:
        words = psutil.Process(numbers[0]).cmdline()
    except (psutil.Error, OSError):
        words = []
    command = _shortened(words)
    return f"process {numbers[0]} ({command})" if command else f"process {numbers[0]}"


def _shortened(words: list[str]) -> str:
    """Returns a command line without the interpreter of a script, and without the folder of the program."""
    if len(words) > 1 and os.path.basename(words[0]).startswith("python") and not words[1].startswith("-"):
        words = words[1:]
    command = " ".join([os.path.basename(words[0]), *words[1:]]) if words else ""
    return command if len(command) <= _SHOWN else f"{command[: _SHOWN - 1]}…"
