"""Defines the errors that a user can act on; each message states what is wrong and what to do."""

from __future__ import annotations

import reprlib

from vllm_patchbay.errors import nearest as nearest


class BackplaneError(RuntimeError):
    """Reports that the installation or the configuration is wrong, and names the remedy; base of all other errors."""


class UsageError(BackplaneError):
    """Reports a mistake in a command line or in its surroundings. The command ends with the status 2."""


class DeviceUnavailable(BackplaneError):
    """Reports that the requested device cannot be used on this machine, or that no device can."""


class BindingError(BackplaneError):
    """Reports that a replacement does not match the vLLM class or kernel that it is bound to."""


class OptionError(UsageError, ValueError):
    """Reports that an option is unknown, or that its value is not allowed."""


class OperatorError(BackplaneError):
    """Reports that an operator was declared, implemented, changed or called in a way that is not allowed."""


class GraphError(BackplaneError):
    """Reports that a graph cannot be captured or replayed, or that its replay would give wrong results."""


class StaleInputError(GraphError):
    """Reports that a graph was not replayed because an input is at another address than at the capture.

    Nothing was computed.
    """


class NumericFault(BackplaneError):
    """Reports that the numeric guard found NaN, Inf or a number beyond 1e30; the message names the first module whose
    output has one."""


class CheckpointError(BackplaneError):
    """Reports that a checkpoint is damaged, incomplete, or of an unsupported kind."""


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel = 1


def short_repr(value: object) -> str:
    """Returns the `repr` of a value from a file or a user, for an error text, with the middle of a long one left out.

    The omitted part is not read, so a value of any size costs little.
    """
    return _SHORT.repr(value)
