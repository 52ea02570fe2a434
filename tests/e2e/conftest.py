"""Fixtures of the end-to-end tests. The report of a failure shows the logs of the processes that the test started."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import endings
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
    return obtain(FULL_PRECISION.name)


@pytest.fixture(scope="session")
def minilm() -> Path:
    return obtain("minilm")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """Llama with 4 heads, 2 KV heads and 4 layers, which divide by two as SmolLM2's 9 heads do not."""
    return tiny_models.save_llama(tmp_path_factory.mktemp("tiny-llama"), tokenizer_of=smollm2)


@pytest.fixture
def start(tiny_llama: Path, tmp_path: Path) -> Iterator[endings.Starter]:
    """Starts small servers that the test may end in any way."""
    starter = endings.Starter(tiny_llama, tmp_path)
    yield starter
    starter.kill()
