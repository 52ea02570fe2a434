"""Verifying the guards of a recorded release parses no file of vLLM, so a start does not become slower."""

from __future__ import annotations

from benchmarks import guards


def test_every_guard_is_verified_in_little_processor_time() -> None:
    """The bound is more than ten times what it takes. Parsing the files of vLLM would take seconds."""
    assert guards.processor_seconds() < 0.5
