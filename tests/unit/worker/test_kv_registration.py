"""A KV connector drops its registration of the KV cache before that is released, and renews it afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import vllm.distributed.kv_transfer as kv_transfer

from vllm_backplane.errors import BackplaneError
from vllm_backplane.worker.worker import BackplaneWorker


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    done: list[str] = []
    names = ("unregister_kv_caches", "restore_kv_caches")
    connector = SimpleNamespace(**{name: lambda name=name: done.append(name) for name in names})
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: connector)
    return done


def worker(calls: list[str]) -> Any:
    sleeper = SimpleNamespace(wake=lambda _tags: calls.append("wake"), discard=lambda _tags: calls.append("discard"))
    return SimpleNamespace(sleeper=sleeper, _begin_weight_change=lambda: calls.append("weight change"))


@pytest.mark.parametrize("tags", [None, ["kv_cache"], ["weights", "kv_cache"]])
def test_it_is_renewed_after_the_memory_is_back(calls: list[str], tags: list[str] | None) -> None:
    BackplaneWorker._wake(worker(calls), tags)
    assert calls == ["wake", "restore_kv_caches"]


def test_weights_alone_do_not_concern_it(calls: list[str]) -> None:
    BackplaneWorker._wake(worker(calls), ["weights"])
    BackplaneWorker._discard(worker(calls), ["weights"])
    assert calls == ["wake", "weight change", "discard"]


def test_it_is_dropped_before_the_memory_is_released(calls: list[str]) -> None:
    BackplaneWorker._discard(worker(calls), ["kv_cache"])
    assert calls == ["unregister_kv_caches", "discard"]


def test_an_unknown_tag_changes_nothing(calls: list[str]) -> None:
    with pytest.raises(BackplaneError, match="no tag 'bogus'"):
        BackplaneWorker._discard(worker(calls), ["kv_cache", "bogus"])
    assert calls == []


def test_a_connector_of_an_older_release_has_no_such_methods(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: SimpleNamespace())
    BackplaneWorker._discard(worker(calls), ["kv_cache"])
    BackplaneWorker._wake(worker(calls), None)
    assert calls == ["discard", "wake"]
