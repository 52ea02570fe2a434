"""Tests whether the counts of sampled values fit a distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

UNLIKELY = 1e-6
"""Significance level: samples of the right distribution have a smaller p-value in one of a million runs."""


def p_value(counts: Sequence[float], probabilities: Sequence[float]) -> float:
    """Returns the p-value of Pearson's chi-square test.

    Cells in which fewer than five draws are expected are merged into one cell.
    """
    seen, share = torch.tensor(counts, dtype=torch.float64), torch.tensor(probabilities, dtype=torch.float64)
    expected = share / share.sum() * seen.sum()
    rare = expected < 5
    if bool((seen[share == 0] > 0).any()):
        return 0.0  # a value of probability zero was drawn
    seen = torch.cat([seen[~rare], seen[rare].sum().view(1)])
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    if float(expected[-1]) < 5:  # the merged cell is too rare, too: add it to the most frequent one
        most = int(expected[:-1].argmax())
        seen[most] += seen[-1]
        expected[most] += expected[-1]
        seen, expected = seen[:-1], expected[:-1]
    if seen.numel() < 2:
        raise ValueError("the test needs at least two cells with five expected draws; draw more values")
    statistic = ((seen - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((seen.numel() - 1) / 2, dtype=torch.float64), statistic / 2))
