"""Declares the operator that counts NaN and Inf in a tensor and finds its range, for the numeric guard.

It does not wait for the device: each call writes one row of a table that stays on the device. A step checks many
tensors, and the host reads the table once, after all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_backplane.ops.operator import EXACT, Sample, SampleSpace, nothing, operator

FIELDS = ("nan", "inf", "first_row", "last_row", "bad_rows", "lowest", "highest")
"""Columns of the table: the number of NaN and of infinities; the first and last row (index of the first dimension)
that has one, -1 if none has, and the number of such rows; the smallest and largest finite value, inf and -inf if there
is none."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _samples(space: SampleSpace) -> Iterator[Sample]:
    table = space.normal(4, len(FIELDS), dtype=torch.float32)
    for shape in ((1, 8), (5, 64), (7, 577), (3, 4, 32), (9,), (), (300, 700)):
        yield Sample(f"finite {shape}", (space.normal(*shape), -1, table, 1))
    bad = space.normal(6, 3, 50)
    bad[1, 0, 3] = bad[4, 2, 49] = torch.nan
    bad[2, 1, :7] = torch.inf
    bad[2, 2, 9] = -torch.inf
    yield Sample("NaN and Inf", (bad, -1, table, 0))
    yield Sample("without the last rows", (bad, 4, table, 3))
    yield Sample("without the only bad row", (bad[:2], 1, table, 2))
    yield Sample("slice of the last dimension", (bad[..., 10:], -1, table, 2))
    yield Sample("transposed", (bad.transpose(0, 2), 20, table, 2))
    yield Sample("nothing finite", (torch.full_like(bad[0], torch.nan), -1, table, 2))
    yield Sample("negative only", (-space.uniform(3, 40, dtype=space.dtype) - 1, -1, table, 2))
    yield Sample("no rows", (space.normal(0, 4), -1, table, 2))
    yield Sample("zero of six rows", (bad, 0, table, 2))
    yield Sample("no columns", (space.normal(4, 0), -1, table, 2))


@operator(
    "(Tensor x, int rows, Tensor(a!) table, int slot) -> ()",
    samples=_samples,
    fake=nothing,
    tolerances=dict.fromkeys(FLOATS, EXACT),
    dtypes=FLOATS[:3],
)
def tally_values(x: torch.Tensor, rows: int, table: torch.Tensor, slot: int) -> None:
    """Writes the number of NaN and Inf and the range of x's first `rows` rows (-1: all) to row `slot` of a table."""
    seen = x.reshape(1, 1) if x.dim() == 0 else x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
    seen = seen[:rows] if rows >= 0 else seen
    if seen.numel() == 0:
        table[slot] = torch.tensor([0, 0, -1, -1, 0, torch.inf, -torch.inf], dtype=torch.float32).to(table.device)
        return
    nan, inf = seen.isnan(), seen.isinf()
    bad = nan | inf
    bad_rows = bad.any(1)
    index = torch.arange(seen.shape[0], device=x.device)
    last = torch.where(bad_rows, index, -1).amax()
    first = torch.where(bad_rows, index, seen.shape[0]).amin()
    values = (
        nan.sum(),
        inf.sum(),
        torch.where(last < 0, last, first),
        last,
        bad_rows.sum(),
        seen.masked_fill(bad, torch.inf).amin(),
        seen.masked_fill(bad, -torch.inf).amax(),
    )
    table[slot] = torch.stack([value.float() for value in values])
