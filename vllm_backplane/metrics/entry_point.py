"""Offers the stat logger to vLLM as an entry point of the group `vllm.stat_logger_plugins`, where it is wanted.

An entry point in the metadata of the package would concern everyone who has installed it. If vLLM finds a stat logger,
it ignores --disable-log-stats, whatever platform is active and whatever the logger does. So the entry point belongs to
a distribution that exists in this process alone. `importlib.metadata` asks the finders of `sys.meta_path` for such
distributions, and vLLM finds the entry point in the same way as one in an installed package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder
from typing import Any

GROUP, NAME = "vllm.stat_logger_plugins", "backplane"
LOGGER = "vllm_backplane.metrics.stat_logger:BackplaneStatLogger"
_FILES = {
    "METADATA": "Metadata-Version: 2.1\nName: vllm-backplane-stat-logger\nVersion: 0\n",
    "entry_points.txt": f"[{GROUP}]\n{NAME} = {LOGGER}\n",
}


class _StatLoggerDistribution(Distribution):
    """Represents a distribution with nothing but the entry point."""

    def read_text(self, filename: str) -> str | None:
        return _FILES.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: the distribution has no files")


class _Finder(DistributionFinder):
    """Finds the distribution, and no modules."""

    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        name = None if context is None else context.name
        distribution = _StatLoggerDistribution()
        return [distribution] if name in (None, distribution.name) else []


_finder = _Finder()


def offer(wanted: bool) -> None:
    """Makes vLLM find the stat logger in this process from now on, or not find it."""
    if wanted and _finder not in sys.meta_path:
        sys.meta_path.append(_finder)
    elif not wanted and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
