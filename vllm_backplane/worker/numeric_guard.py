"""The numeric guard: the first module of a step whose output has values that are not finite, or beyond any model's.

Forward hooks on the model's own modules look at what goes into them and at what comes out (`ops.tally_values`, on the
device, without waiting). At the end of a step the host reads one small table and finds the first bad output in it.
Only outputs raise an alarm: a mask of infinities that goes into a module, or memory that is passed in to be written,
is nobody's fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from vllm_backplane import ops
from vllm_backplane.errors import NumericFault
from vllm_backplane.ops.tally import FIELDS, FLOATS

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
        huge = (table[:, 6] > HUGE) | (table[:, 5] < -HUGE)
        bad = ((table[:, 0] + table[:, 1] > 0) | huge).nonzero().flatten().tolist()
        seen = [Seen(*fields) for fields in self._seen] if bad else []
        first = next((row for row in bad if seen[row].is_output), None)
        if first is None:
            return
        tallies = [Tally(*row) for row in table[: first + 1].tolist()]
        self._fault = fault(self, seen, tallies, first, requests)
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


if TYPE_CHECKING:
    from vllm_backplane.worker.numeric_guard import NumericGuard, Seen


HUGE = 1e30
"""No model computes numbers beyond this, and one whose highest bit of the exponent was flipped mostly is: 0.1 becomes
3e37."""


class Tally(NamedTuple):
    """A row of the table, as `ops.tally.FIELDS` names it."""

    nan: float
    inf: float
    first_row: float
    last_row: float
    bad_rows: float
    lowest: float
    highest: float

    @property
    def is_bad(self) -> bool:
        return self.nan + self.inf > 0 or self.is_huge

    @property
    def is_huge(self) -> bool:
        return self.highest > HUGE or self.lowest < -HUGE

    def amount(self) -> str:
        found = [f"{int(n)} {what}" for n, what in ((self.nan, "NaN"), (self.inf, "Inf")) if n]
        found += [f"numbers beyond {HUGE:g}"] if self.is_huge else []
        return " and ".join(found) if found else "no bad values"

    def span(self) -> str:
        if self.lowest > self.highest:
            return "no finite value"
        return f"finite values from {self.lowest:.6g} to {self.highest:.6g}"


def fault(
    guard: NumericGuard, seen: Sequence[Seen], tallies: Sequence[Tally], at: int, requests: Mapping[str, int] | None
) -> NumericFault:
    """The error for a bad output in row `at` of the table."""
    entry, tally = seen[at], tallies[at]
    what = "not finite" if tally.nan + tally.inf > 0 else "too large for a model"
    where = (
        f"numeric guard, {guard.place}, step {guard.step}: the first output with values that are {what} is that of "
        f"{_module(entry)}: {tally.amount()} in its {entry.label} ({_type(entry)}; {tally.span()}), in "
        f"{_rows(entry, tally, requests)}."
    )
    bad = [row for row in entry.inputs if tallies[row].is_bad]
    whence = _came_in(seen, tallies, at, bad) if bad else _arose(guard, entry, seen, tallies)
    return NumericFault(f"{where} {whence}")


def _module(entry: Seen) -> str:
    return f"{entry.module or 'the model'} ({entry.kind})"


def _type(entry: Seen) -> str:
    return f"{str(entry.dtype).removeprefix('torch.')} {list(entry.shape)}"


def _rows(entry: Seen, tally: Tally, requests: Mapping[str, int] | None) -> str:
    first, last, count = int(tally.first_row), int(tally.last_row), int(tally.bad_rows)
    if count == 0:  # of huge numbers only the range is known
        return "rows that are not known"
    what = "token" if entry.by_token else "row"
    text = f"{what} {first}" if first == last else f"{count} {what}s, the first {first} and the last {last}"
    text += f" of {entry.shape[0]}" if entry.shape else ""
    if not requests:
        return text
    if entry.by_token:
        owners, end = [], 0
        for request, tokens in requests.items():
            start, end = end, end + tokens
            if start <= last and first < end:
                owners.append(request)
    elif entry.shape and entry.shape[0] == len(requests):  # one row for each, as logits have
        owners = list(requests)[first : last + 1]
    else:
        return text
    if len(owners) == 1:
        return f"{text} (request {owners[0]})"
    between = "requests" if count == last - first + 1 else "some of the requests"
    return f"{text} ({between} {', '.join(owners)})" if owners else text


def _arose(guard: NumericGuard, entry: Seen, seen: Sequence[Seen], tallies: Sequence[Tally]) -> str:
    ranges = [f"{seen[row].label} {_type(seen[row])}: {tallies[row].span()}" for row in entry.inputs]
    inputs = "; ".join(ranges) or "none of floating point"
    text = f"Its inputs had no such values ({inputs}), so they arose in it"
    if parameters := guard.bad_parameters(entry.module):
        return f"{text}, and its own parameters are bad: {', '.join(parameters)}. Look at how weights reach the device."
    inside = "" if guard.parts else "; numeric_guard=modules looks at its parts"
    return (
        f"{text}, and its parameters are finite: a kernel, memory that was overwritten, or a number that the type "
        f"cannot hold{inside}. BACKPLANE_REFERENCE_OPS=all runs it without the device's kernels, for comparison."
    )


def _came_in(seen: Sequence[Seen], tallies: Sequence[Tally], at: int, bad: Sequence[int]) -> str:
    entry = seen[at]
    inputs = ", ".join(f"{seen[row].label} with {tallies[row].amount()}" for row in bad)
    earliest = next(row for row in range(at) if tallies[row].is_bad)
    before = next((seen[row] for row in range(earliest - 1, -1, -1) if seen[row].is_output), None)
    if before is None:
        since = "they came into the model with the step"
    else:
        since = f"they arose between modules, after {_module(before)}, whose output was finite"
    where = "" if seen[earliest].module == entry.module else f", first in an input of {_module(seen[earliest])}"
    return f"They were in its inputs already ({inputs}){where}: no module's output had them before, so {since}."
