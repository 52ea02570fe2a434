"""Which options were stated, of those that vLLM fills in before it shows a platform its configuration.

The engine's arguments still tell them apart: None is what nobody said. So they are noted there
(`patch/platform/patch_arg_utils.py`), the same for a command line and for Python, and the note goes with the
configuration into every process.
"""

from __future__ import annotations

from typing import Any

WATCHED = ("async_scheduling", "enable_prefix_caching")
_NOTE = "backplane_stated"


def with_note(additional_config: Any, arguments: Any) -> Any:
    """What `additional_config` becomes: with those of an engine's arguments that somebody stated. It is copied, because
    it may be an object of the user's. Where there is a note it stays: by then vLLM has filled the arguments in."""
    if not isinstance(additional_config, dict) or _NOTE in additional_config:
        return additional_config  # vLLM takes other objects in its place, and those cannot carry a note
    values = {name: getattr(arguments, name) for name in WATCHED}
    return {**additional_config, _NOTE: {name: value for name, value in values.items() if value is not None}}


def stated(additional_config: Any, name: str) -> Any:
    """The value that somebody gave an option; None where nobody did."""
    note = additional_config.get(_NOTE, {}) if isinstance(additional_config, dict) else {}
    return note.get(name)
