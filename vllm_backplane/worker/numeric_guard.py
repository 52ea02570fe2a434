"""The numeric guard: the first module of a step whose output has values that are not finite, or beyond any model's.

Forward hooks on the model's own modules look at what goes into them and at what comes out (`ops.tally_values`, on the
device, without waiting). At the end of a step the host reads one small table and finds the first bad output in it.
Only outputs raise an alarm: a mask of infinities that goes into a module, or memory that is passed in to be written,
is nobody's fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm_backplane import ops
from vllm_backplane.errors import NumericFault
from vllm_backplane.ops.tally import FIELDS, FLOATS
from vllm_backplane.worker import numeric_report

ROWS_OF_A_TABLE = 1024
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_PLAIN = (int, float, str, torch.dtype, torch.device)
_FLOATS = frozenset(FLOATS)
_NO_INPUTS = range(0)
_tally = ops.tally_values.call


class Seen(NamedTuple):
    """A tensor that was looked at; its numbers are in the table, in the row of the same index."""

    module: str
    kind: str
    """Of the module."""
    place: tuple[str | int, ...]
    """Which of the module's tensors: ("output",), ("output", 1), ("input", 0), ("input", "residual")."""
    is_output: bool
    shape: torch.Size
    dtype: torch.dtype
    by_token: bool
    """Its rows are the tokens of the step."""
    inputs: range
    """Of an output: the rows of the table with what went into the same call."""

    @property
    def label(self) -> str:
        words = (f"[{step}]" if isinstance(step, int) else f" {step}" for step in self.place)
        return "".join(words).lstrip()


@dataclass(frozen=True, slots=True)
class Border:
    names: tuple[str, ...]
    """More than one where layers share a module, as they do their rotary embedding."""
    module: nn.Module
    kind: str


def borders(model: nn.Module, *, parts: bool) -> list[Border]:
    """Where to look: everything that is called, or (not `parts`) no deeper than the members of the outermost lists of
    modules, which is what the decoder layers of every model are."""
    found: dict[nn.Module, list[str]] = {}

    def walk(name: str, module: nn.Module, in_list: bool) -> None:
        if not isinstance(module, _CONTAINERS):
            found.setdefault(module, []).append(name)
            if in_list and not parts:
                return
        inside = in_list or isinstance(module, _CONTAINERS)
        for child_name, child in module.named_children():
            walk(f"{name}.{child_name}" if name else child_name, child, inside)

    walk("", model, False)
    return [Border(tuple(names), module, type(module).__name__) for module, names in found.items()]


def tensors_in(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """The tensors of arguments and results, and where. What passes between pipeline stages has them in `tensors`."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from tensors_in(item, (*place, index))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, (*place, key))
    elif not isinstance(value, nn.Module) and isinstance(inner := getattr(value, "tensors", None), Mapping):
        yield from tensors_in(inner, place)


class NumericGuard:
    """Watches one model. `place` says which worker this is, as the report is to call it."""

    def __init__(self, model: nn.Module, device: torch.device, place: str, *, parts: bool) -> None:
        self.place = place
        self.parts = parts
        self.step = 0
        self.borders = borders(model, parts=parts)
        self._device = device
        self._modules = {name: border.module for border in self.borders for name in border.names}
        self._tables: list[torch.Tensor] = []
        self._seen: list[tuple[Any, ...]] = []  # of Seen's fields: making one at each look would cost more than looking
        self._rows: int | None = None
        self._calls: list[tuple[str, range]] = []
        self._fault: NumericFault | None = None
        self._tokens: int | None = None
        self._rows_of_step: Callable[[], int | None] | None = None
        self._handles = []
        for border in self.borders:
            hooks = _Hooks(self, border)
            self._handles.append(border.module.register_forward_pre_hook(hooks.before, with_kwargs=True))
            self._handles.append(border.module.register_forward_hook(hooks.after))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin(self, tokens: int, rows_of_step: Callable[[], int | None]) -> None:
        """Look, from here on. Of tensors with as many rows as `rows_of_step` says at that time, the first `tokens` are
        the step's; what follows them is padding, in which anything may be."""
        self.step += 1
        self._seen.clear()
        self._calls.clear()
        self._tokens, self._rows_of_step = tokens, rows_of_step

    def abandon(self) -> None:
        """The step ended otherwise. Runs that are not steps (profiling, warm-up) are not looked at either: they compute
        with whatever is in memory."""
        self._rows_of_step = None

    def finish(self, requests: Mapping[str, int] | None = None) -> None:
        """Read the table, and raise a NumericFault if an output was bad. `requests`: their tokens in the step, in the
        order of its rows."""
        self.abandon()
        if not self._seen:
            return
        size = ROWS_OF_A_TABLE
        used = [table[: len(self._seen) - at * size] for at, table in enumerate(self._tables)]
        # One copy of one tensor is what the host waits for.
        table = (used[0] if len(self._seen) <= size else torch.cat(used)[: len(self._seen)]).cpu()
        huge = (table[:, 6] > numeric_report.HUGE) | (table[:, 5] < -numeric_report.HUGE)
        bad = ((table[:, 0] + table[:, 1] > 0) | huge).nonzero().flatten().tolist()
        seen = [Seen(*fields) for fields in self._seen] if bad else []
        first = next((row for row in bad if seen[row].is_output), None)
        if first is None:
            return
        tallies = [numeric_report.Tally(*row) for row in table[: first + 1].tolist()]
        self._fault = numeric_report.fault(self, seen, tallies, first, requests)
        raise self._fault

    def insist(self) -> None:
        """Raise the fault that was found, if one was: nothing is computed after it."""
        if self._fault is not None:
            raise self._fault

    # --- looking ------------------------------------------------------------------------------------------------------

    @property
    def watching(self) -> bool:
        return self._rows_of_step is not None

    def enter(self, border: Border, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._calls:  # inside of a call it does not change
            assert self._rows_of_step is not None
            self._rows = self._rows_of_step()
        name = border.names[0] if len(border.names) == 1 else self._name_here(border)
        start = len(self._seen)
        for index, value in enumerate(args):
            self._look_into(name, border, ("input", index), value, False, _NO_INPUTS)
        for key, value in kwargs.items():
            self._look_into(name, border, ("input", key), value, False, _NO_INPUTS)
        self._calls.append((name, range(start, len(self._seen))))

    def leave(self, border: Border, result: Any) -> None:
        if not self._calls:  # the call began before the step
            return
        name, inputs = self._calls.pop()
        self._look_into(name, border, ("output",), result, True, inputs)

    def _look_into(
        self, name: str, border: Border, place: tuple[Any, ...], value: Any, is_output: bool, inputs: range
    ) -> None:
        """Look at every tensor in a value."""
        if isinstance(value, torch.Tensor):
            self._look(name, border, place, value, is_output, inputs)
        elif value is not None and not isinstance(value, _PLAIN):
            for inner, tensor in tensors_in(value, place):
                self._look(name, border, inner, tensor, is_output, inputs)

    def _name_here(self, border: Border) -> str:
        """Of a shared module, the name that it has in the module that is running."""
        for running, _ in reversed(self._calls):
            for name in border.names:
                if name.startswith(f"{running}." if running else running):
                    return name
        return border.names[0]

    def _look(
        self, name: str, border: Border, place: tuple[Any, ...], tensor: torch.Tensor, is_output: bool, inputs: range
    ) -> None:
        dtype = tensor.dtype
        if dtype not in _FLOATS or tensor.device.type != self._device.type:
            return
        shape = tensor.shape
        by_token = len(shape) > 0 and shape[0] == self._rows
        rows = self._tokens if by_token and self._tokens is not None else -1
        at, slot = divmod(len(self._seen), ROWS_OF_A_TABLE)
        if at == len(self._tables):
            self._tables.append(self.new_table(ROWS_OF_A_TABLE))
        _tally(tensor, rows, self._tables[at], slot)
        self._seen.append((name, border.kind, place, is_output, shape, dtype, by_token, inputs))

    def new_table(self, rows: int) -> torch.Tensor:
        return torch.empty(rows, len(FIELDS), dtype=torch.float32, device=self._device)

    # --- after the fact -----------------------------------------------------------------------------------------------

    def bad_parameters(self, module: str) -> list[str]:
        """Parameters of a module that are not finite, now."""
        found = [(name, p) for name, p in self._modules[module].named_parameters() if p.dtype in _FLOATS]
        if not found:
            return []
        table = self.new_table(len(found))
        for slot, (_, parameter) in enumerate(found):
            _tally(parameter.detach(), -1, table, slot)
        counts = table.cpu()[:, :2].sum(1).int().tolist()
        return [f"{name} ({count} values)" for (name, _), count in zip(found, counts, strict=True) if count]


class _Hooks:
    """The two hooks of a module."""

    __slots__ = ("_border", "_guard")

    def __init__(self, guard: NumericGuard, border: Border) -> None:
        self._guard = guard
        self._border = border

    def before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._guard.watching:
            self._guard.enter(self._border, args, kwargs)

    def after(self, _module: nn.Module, _args: tuple[Any, ...], result: Any) -> None:
        if self._guard.watching:
            self._guard.leave(self._border, result)
