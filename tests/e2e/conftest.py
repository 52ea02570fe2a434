"""Provides the fixtures of the end-to-end tests, and adds the logs of a test's processes to the report of a failure."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import ending_servers
import processes
import pytest
import tiny_models

from vllm_backplane.models import FULL_PRECISION, obtain


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    if report.failed:
        for command, log in processes.logs[-4:]:
            if log.exists():
                report.sections.append((f"end of {log} ({command})", processes.tail(log)))
    return report


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Returns the folder of the default model in full precision."""
    return obtain(FULL_PRECISION.name)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Returns the folder of the embedding model."""
    return obtain("minilm")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """Returns the folder of a Llama with 4 heads, 2 KV heads and 4 layers.

    These numbers are divisible by two, for two workers; the 9 heads of SmolLM2 are not.
    """
    return tiny_models.save_llama(tmp_path_factory.mktemp("tiny-llama"), tokenizer_of=smollm2)


@pytest.fixture
def start(tiny_llama: Path, tmp_path: Path) -> Iterator[ending_servers.Starter]:
    """Returns a function that starts small servers, which the test may end in any way."""
    starter = ending_servers.Starter(tiny_llama, tmp_path)
    yield starter
    starter.kill()
