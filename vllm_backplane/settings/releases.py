"""Which releases of vLLM this package serves, and what is run on each.

Whatever says so says it from here: `doctor`, the version matrix, and the tests that read each release's source.
"""

from __future__ import annotations

from dataclasses import dataclass

FULL = "every test"
SMOKE = "doctor, patches check, chat, batch and embeddings"


@dataclass(frozen=True, slots=True)
class Release:
    version: str
    torch: str
    """What vLLM's own metadata asks for."""
    covered: str
    """What is run on it."""

    @property
    def series(self) -> tuple[int, ...]:
        """(major, minor): patch releases count as the release they mend."""
        return tuple(map(int, self.version.split(".")[:2]))


RELEASES: tuple[Release, ...] = (
    Release("0.30.0", "2.13.0", SMOKE),
    Release("0.31.0", "2.13.0", SMOKE),
    Release("0.32.0", "2.13.0", FULL),
)
"""Oldest first. The last is the one that 'make setup' installs."""

NEWEST = RELEASES[-1]


def covering(series: tuple[int, ...]) -> Release | None:
    """The release that stands for a series, or None if it is not served."""
    return next((release for release in RELEASES if release.series == series), None)
