"""Implements the numeric guard, which finds the first module of a step whose output contains NaN, Inf or
numbers too large for a model.

Forward hooks on the model's modules tally the tensors that go in and come out (`ops.tally_values`, on the device and
without synchronization). At the end of a step the host reads one small table and searches it for the first bad output.
Only outputs raise an error. Bad inputs alone do not: a mask may contain infinities, and a module may receive
uninitialized memory to write to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm_backplane import ops
from vllm_backplane.errors import NumericFault
from vllm_backplane.ops.tally import FIELDS, FLOATS

ROWS_OF_A_TABLE = 1024
HUGE = 1e30
"""No model computes numbers beyond this. A number whose highest exponent bit was flipped mostly exceeds it: 0.1 becomes
3e37."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_PLAIN = (int, float, str, torch.dtype, torch.device)
_FLOATS = frozenset(FLOATS)
_NO_INPUTS = range(0)
_tally = ops.tally_values.call


class TensorRecord(NamedTuple):
    """Describes a tensor that was tallied; its numbers are in the table, in the row with the same index."""

    module: str
    kind: str
    """Class name of the module."""
    place: tuple[str | int, ...]
    """Which of the module's tensors: ("output",), ("output", 1), ("input", 0), ("input", "residual")."""
    is_output: bool
    shape: torch.Size
    dtype: torch.dtype
    by_token: bool
    """The rows of the tensor are the tokens of the step."""
    inputs: range
    """For an output: the table rows of the inputs of the same call."""

    @property
    def label(self) -> str:
        words = (f"[{step}]" if isinstance(step, int) else f" {step}" for step in self.place)
        return "".join(words).lstrip()


class Tally(NamedTuple):
    """Holds one row of the table, with the fields of `ops.tally.FIELDS`."""

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


@dataclass(frozen=True, slots=True)
class WatchedModule:
    names: tuple[str, ...]
    """Names of the module in the model; more than one if layers share it, as they share a rotary embedding."""
    module: nn.Module
    kind: str
    """Class name of the module."""


def watched_modules(model: nn.Module, *, submodules: bool) -> list[WatchedModule]:
    """Returns the modules to hook: with `submodules`, every module that is called; otherwise none deeper than the
    members of the outermost lists of modules, which are the decoder layers in every model."""
    found: dict[nn.Module, list[str]] = {}

    def walk(name: str, module: nn.Module, in_list: bool) -> None:
        if not isinstance(module, _CONTAINERS):
            found.setdefault(module, []).append(name)
            if in_list and not submodules:
                return
        inside = in_list or isinstance(module, _CONTAINERS)
        for child_name, child in module.named_children():
            walk(f"{name}.{child_name}" if name else child_name, child, inside)

    walk("", model, False)
    return [WatchedModule(tuple(names), module, type(module).__name__) for module, names in found.items()]


def tensors_in(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Yields the tensors of arguments or results, each with its place. vLLM's intermediate tensors between pipeline
    stages hold theirs in the attribute `tensors`."""
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
    """Watches one model. `worker` names this worker in the error."""

    def __init__(self, model: nn.Module, device: torch.device, worker: str, *, submodules: bool) -> None:
        self.worker = worker
        self.submodules = submodules
        self.step = 0
        self.watched = watched_modules(model, submodules=submodules)
        self._device = device
        self._modules = {name: watched.module for watched in self.watched for name in watched.names}
        self._tables: list[torch.Tensor] = []
        self._records: list[tuple[Any, ...]] = []  # fields of TensorRecord; building one per tensor costs too much
        self._rows: int | None = None
        self._calls: list[tuple[str, range]] = []
        self._fault: NumericFault | None = None
        self._tokens: int | None = None
        self._rows_of_step: Callable[[], int | None] | None = None
        self._handles = []
        for watched in self.watched:
            hooks = _Hooks(self, watched)
            self._handles.append(watched.module.register_forward_pre_hook(hooks.before, with_kwargs=True))
            self._handles.append(watched.module.register_forward_hook(hooks.after))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin(self, tokens: int, rows_of_step: Callable[[], int | None]) -> None:
        """Starts watching a step. Of a tensor with as many rows as `rows_of_step` returns at that time, only the first
        `tokens` are checked; the others are padding and may hold anything."""
        self.step += 1
        self._records.clear()
        self._calls.clear()
        self._tokens, self._rows_of_step = tokens, rows_of_step

    def abandon(self) -> None:
        """Stops watching without a check, because the step failed. Runs outside of steps (profiling, warm-up) are not
        watched either: they compute on uninitialized memory."""
        self._rows_of_step = None

    def finish(self, requests: Mapping[str, int] | None = None) -> None:
        """Reads the table, and raises a NumericFault if an output was bad. `requests` maps each request to its tokens
        in the step, in the order of the step's rows."""
        self.abandon()
        if not self._records:
            return
        size = ROWS_OF_A_TABLE
        used = [table[: len(self._records) - at * size] for at, table in enumerate(self._tables)]
        # The host waits for one copy of one tensor only.
        table = (used[0] if len(self._records) <= size else torch.cat(used)[: len(self._records)]).cpu()
        huge = (table[:, 6] > HUGE) | (table[:, 5] < -HUGE)
        bad = ((table[:, 0] + table[:, 1] > 0) | huge).nonzero().flatten().tolist()
        records = [TensorRecord(*fields) for fields in self._records] if bad else []
        first = next((row for row in bad if records[row].is_output), None)
        if first is None:
            return
        tallies = [Tally(*row) for row in table[: first + 1].tolist()]
        self._fault = fault(self, records, tallies, first, requests)
        raise self._fault

    def raise_if_failed(self) -> None:
        """Raises the fault of an earlier step again: no step is computed after one."""
        if self._fault is not None:
            raise self._fault

    # --- tallies ------------------------------------------------------------------------------------------------------

    @property
    def watching(self) -> bool:
        return self._rows_of_step is not None

    def enter(self, watched: WatchedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._calls:  # the number of rows does not change inside a call
            assert self._rows_of_step is not None
            self._rows = self._rows_of_step()
        name = watched.names[0] if len(watched.names) == 1 else self._name_in_caller(watched)
        start = len(self._records)
        for index, value in enumerate(args):
            self._record_all(name, watched, ("input", index), value, False, _NO_INPUTS)
        for key, value in kwargs.items():
            self._record_all(name, watched, ("input", key), value, False, _NO_INPUTS)
        self._calls.append((name, range(start, len(self._records))))

    def leave(self, watched: WatchedModule, result: Any) -> None:
        if not self._calls:  # the call began before the step
            return
        name, inputs = self._calls.pop()
        self._record_all(name, watched, ("output",), result, True, inputs)

    def _record_all(
        self, name: str, watched: WatchedModule, place: tuple[Any, ...], value: Any, is_output: bool, inputs: range
    ) -> None:
        """Tallies every tensor in a value."""
        if isinstance(value, torch.Tensor):
            self._record(name, watched, place, value, is_output, inputs)
        elif value is not None and not isinstance(value, _PLAIN):
            for inner, tensor in tensors_in(value, place):
                self._record(name, watched, inner, tensor, is_output, inputs)

    def _name_in_caller(self, watched: WatchedModule) -> str:
        """Returns the name that a shared module has inside the innermost running module."""
        for running, _ in reversed(self._calls):
            for name in watched.names:
                if name.startswith(f"{running}." if running else running):
                    return name
        return watched.names[0]

    def _record(
        self,
        name: str,
        watched: WatchedModule,
        place: tuple[Any, ...],
        tensor: torch.Tensor,
        is_output: bool,
        inputs: range,
    ) -> None:
        dtype = tensor.dtype
        if dtype not in _FLOATS or tensor.device.type != self._device.type:
            return
        shape = tensor.shape
        by_token = len(shape) > 0 and shape[0] == self._rows
        rows = self._tokens if by_token and self._tokens is not None else -1
        at, slot = divmod(len(self._records), ROWS_OF_A_TABLE)
        if at == len(self._tables):
            self._tables.append(self.new_table(ROWS_OF_A_TABLE))
        _tally(tensor, rows, self._tables[at], slot)
        self._records.append((name, watched.kind, place, is_output, shape, dtype, by_token, inputs))

    def new_table(self, rows: int) -> torch.Tensor:
        return torch.empty(rows, len(FIELDS), dtype=torch.float32, device=self._device)

    # --- after a fault ------------------------------------------------------------------------------------------------

    def bad_parameters(self, module: str) -> list[str]:
        """Returns the parameters of a module that are not finite now."""
        found = [(name, p) for name, p in self._modules[module].named_parameters() if p.dtype in _FLOATS]
        if not found:
            return []
        table = self.new_table(len(found))
        for slot, (_, parameter) in enumerate(found):
            _tally(parameter.detach(), -1, table, slot)
        counts = table.cpu()[:, :2].sum(1).int().tolist()
        return [f"{name} ({count} values)" for (name, _), count in zip(found, counts, strict=True) if count]


class _Hooks:
    """Implements the two forward hooks of a module."""

    __slots__ = ("_guard", "_watched")

    def __init__(self, guard: NumericGuard, watched: WatchedModule) -> None:
        self._guard = guard
        self._watched = watched

    def before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._guard.watching:
            self._guard.enter(self._watched, args, kwargs)

    def after(self, _module: nn.Module, _args: tuple[Any, ...], result: Any) -> None:
        if self._guard.watching:
            self._guard.leave(self._watched, result)


def fault(
    guard: NumericGuard,
    records: Sequence[TensorRecord],
    tallies: Sequence[Tally],
    at: int,
    requests: Mapping[str, int] | None,
) -> NumericFault:
    """Returns the error for a bad output in row `at` of the table."""
    entry, tally = records[at], tallies[at]
    what = "not finite" if tally.nan + tally.inf > 0 else "too large for a model"
    where = (
        f"numeric guard, {guard.worker}, step {guard.step}: the first output with values that are {what} is that of "
        f"{_module(entry)}: {tally.amount()} in its {entry.label} ({_type(entry)}; {tally.span()}), in "
        f"{_rows(entry, tally, requests)}."
    )
    bad = [row for row in entry.inputs if tallies[row].is_bad]
    cause = _explain_inputs(records, tallies, at, bad) if bad else _explain_module(guard, entry, records, tallies)
    return NumericFault(f"{where} {cause}")


def _module(entry: TensorRecord) -> str:
    return f"{entry.module or 'the model'} ({entry.kind})"


def _type(entry: TensorRecord) -> str:
    return f"{str(entry.dtype).removeprefix('torch.')} {list(entry.shape)}"


def _rows(entry: TensorRecord, tally: Tally, requests: Mapping[str, int] | None) -> str:
    """Returns the bad rows, and the requests to which they belong if that is known."""
    first, last, count = int(tally.first_row), int(tally.last_row), int(tally.bad_rows)
    if count == 0:  # for huge numbers the table has only the range
        return "unknown rows"
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
    elif entry.shape and entry.shape[0] == len(requests):  # one row for each request, as logits have
        owners = list(requests)[first : last + 1]
    else:
        return text
    if len(owners) == 1:
        return f"{text} (request {owners[0]})"
    between = "requests" if count == last - first + 1 else "some of the requests"
    return f"{text} ({between} {', '.join(owners)})" if owners else text


def _explain_module(
    guard: NumericGuard, entry: TensorRecord, records: Sequence[TensorRecord], tallies: Sequence[Tally]
) -> str:
    """Explains bad values that originate in the module: its inputs were good."""
    ranges = [f"{records[row].label} {_type(records[row])}: {tallies[row].span()}" for row in entry.inputs]
    inputs = "; ".join(ranges) or "none of floating point"
    text = f"Its inputs had no such values ({inputs}), so they originate in this module"
    if parameters := guard.bad_parameters(entry.module):
        bad = ", ".join(parameters)
        return f"{text}, and its own parameters are bad: {bad}. Check how weights are copied to the device."
    inside = "" if guard.submodules else "; numeric_guard=modules checks its submodules"
    return (
        f"{text}, and its parameters are finite: suspect a kernel, overwritten memory, or a number that the dtype "
        f"cannot represent{inside}. BACKPLANE_REFERENCE_OPS=all runs it without the device's kernels, for comparison."
    )


def _explain_inputs(records: Sequence[TensorRecord], tallies: Sequence[Tally], at: int, bad: Sequence[int]) -> str:
    """Explains bad values that were already in the inputs of the module."""
    entry = records[at]
    inputs = ", ".join(f"{records[row].label} with {tallies[row].amount()}" for row in bad)
    earliest = next(row for row in range(at) if tallies[row].is_bad)
    before = next((records[row] for row in range(earliest - 1, -1, -1) if records[row].is_output), None)
    if before is None:
        since = "they came into the model with the step"
    else:
        since = f"they originate between modules, after {_module(before)}, whose output was finite"
    where = "" if records[earliest].module == entry.module else f", first in an input of {_module(records[earliest])}"
    return f"They were in its inputs already ({inputs}){where}: no module's output had them before, so {since}."
