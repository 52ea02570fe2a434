"""Errors a user can act on. Each message says what is wrong and names the remedy."""

from __future__ import annotations

import reprlib

from vllm_patchbay.errors import nearest as nearest


class BackplaneError(RuntimeError):
    """Something is wrong with the set-up; the message names the remedy."""


class DeviceUnavailable(BackplaneError):
    """A device was asked for by name and cannot be used here."""


class BindingError(BackplaneError):
    """An override does not match the vLLM class or kernel it claims to replace."""


class OptionError(BackplaneError, ValueError):
    """An option is unknown or has a value it cannot have."""


class OperatorError(BackplaneError):
    """An operator was declared, implemented or changed in a way that is not allowed."""


class GraphError(BackplaneError):
    """A graph was captured or replayed in a way that would give wrong results."""


class StaleInputError(GraphError):
    """A graph was to be replayed with an input that is not where it was captured. Nothing was computed."""


class NumericFault(BackplaneError):
    """The numeric guard found values that are not finite; the message names the module they first came out of."""


class CheckpointError(BackplaneError):
    """A checkpoint is damaged, incomplete, or of a kind that cannot be served."""


_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 80
_SHOWN.maxlevel = 1


def shown(value: object) -> str:
    """What a file or a user gave, for a message: as `repr` has it, with the middle left out where it is long. What is
    left out is not looked at, so a value of any size costs little."""
    return _SHOWN.repr(value)
