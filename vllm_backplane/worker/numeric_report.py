"""What the numeric guard says when it has found something: where, how much, whose, and whether it came from before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm_backplane.errors import NumericFault

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
