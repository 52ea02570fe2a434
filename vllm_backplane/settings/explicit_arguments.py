"""Records which engine arguments were given explicitly, before vLLM fills in its defaults.

vLLM fills in defaults before it passes its configuration to a platform, so an explicit argument and a default look the
same there. In the engine's arguments, None still means that the user gave none. `patches/platform/patch_arg_utils.py`
calls `record` at that moment, for a command line and for Python alike, and the configuration that is built next takes
the record with it (`carried_state.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

WATCHED = ("async_scheduling", "disable_log_stats", "enable_prefix_caching")
"""The arguments that are recorded. `disable_log_stats` is no part of a configuration, and is recorded in any case."""
_ATTRIBUTE = "_backplane_explicit_arguments"
_recorded: ContextVar[Mapping[str, Any] | None] = ContextVar("backplane_explicit_arguments", default=None)


def record(arguments: Any) -> None:
    """Records which of an engine's arguments are explicit.

    The record is kept with the arguments, because vLLM has filled in its defaults by the time a second configuration is
    built from them.
    """
    if _ATTRIBUTE not in vars(arguments):
        values = {name: getattr(arguments, name, None) for name in WATCHED}
        setattr(arguments, _ATTRIBUTE, {name: value for name, value in values.items() if value is not None})
    _recorded.set(getattr(arguments, _ATTRIBUTE))


def take_recorded() -> Mapping[str, Any]:
    """Returns the last record and clears it; empty where a configuration was built without an engine's arguments."""
    recorded = _recorded.get()
    _recorded.set(None)
    return recorded or {}
