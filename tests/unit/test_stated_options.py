"""Options of a command line are noted as they are read; a default is not."""

from __future__ import annotations

import argparse

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_backplane import stated_options
from vllm_backplane.stated_options import note, stated

PREFIXES = "enable_prefix_caching"


@pytest.fixture(autouse=True)
def no_command_line_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stated_options, "_stated", {})


@pytest.mark.parametrize(
    ("given", "expected"), [([], None), (["--enable-prefix-caching"], True), (["--no-enable-prefix-caching"], False)]
)
def test_vllms_own_command_line(given: list[str], expected: bool | None) -> None:
    """The platform is asked by `add_cli_args`, and notes this option."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = parser.parse_args(["--model", "somewhere", *given])
    assert arguments.enable_prefix_caching is expected
    assert stated(PREFIXES) is expected


def test_noted_twice_it_is_read_once() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    parser.add_argument("--beside", default="1")
    note(parser, PREFIXES)
    note(parser, PREFIXES)
    assert parser.parse_args(["--enable-prefix-caching", "--beside", "2"]).enable_prefix_caching
    assert stated(PREFIXES) is True and stated("beside") is None
