"""Tests that explicit engine arguments are distinguished from vLLM's defaults, on the command line and in Python."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import JambaConfig, LlamaConfig
from vllm.config import VllmConfig
from vllm.config.utils import replace
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_backplane.errors import BackplaneError
from vllm_backplane.settings.carried_state import state_of, workers_on_host

SMALL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    LlamaConfig(architectures=["LlamaForCausalLM"], **SMALL).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    JambaConfig(architectures=["JambaForCausalLM"], num_key_value_heads=2, **SMALL).save_pretrained(folder)
    return folder


def by_command_line(model: Path, **options: bool) -> EngineArgs:
    given = [f"--{'' if value else 'no-'}{name.replace('_', '-')}" for name, value in options.items()]
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(
        parser.parse_args(["--model", str(model), "--skip-tokenizer-init", "--max-model-len", "64", *given])
    )


def by_python(model: Path, **options: Any) -> EngineArgs:
    return EngineArgs(model=str(model), skip_tokenizer_init=True, max_model_len=64, **options)


Arguments = Callable[..., EngineArgs]
BOTH = pytest.mark.parametrize("arguments", [by_command_line, by_python])


@BOTH
@pytest.mark.parametrize(("options", "expected"), [({}, False), ({"async_scheduling": True}, True)])
def test_async_scheduling_is_on_where_it_is_requested(
    arguments: Arguments, dense: Path, options: dict[str, bool], expected: bool
) -> None:
    """Runs on a device without streams."""
    made = arguments(dense, **options)
    assert made.create_engine_config().scheduler_config.async_scheduling is expected
    again = made.create_engine_config()  # by now vLLM has filled in its defaults
    assert again.scheduler_config.async_scheduling is expected
    assert again.cache_config.enable_prefix_caching is True
    assert "enable_prefix_caching" not in state_of(again).explicit_arguments


@BOTH
def test_prefix_caching_of_a_hybrid_is_refused_where_it_is_requested(arguments: Arguments, hybrid: Path) -> None:
    assert arguments(hybrid).create_engine_config().cache_config.enable_prefix_caching is False
    with pytest.raises(
        BackplaneError, match=r"JambaForCausalLM carries a recurrent state.* remove --enable-prefix-caching"
    ):
        arguments(hybrid, enable_prefix_caching=True).create_engine_config()


def test_what_a_user_gave_is_left_as_it_was(dense: Path) -> None:
    """The user may pass the same dictionary to the next engine."""
    own = {"backplane": {"memory_share": 0.2}}
    first = by_python(dense, additional_config=own, async_scheduling=True).create_engine_config()
    second = by_python(dense, additional_config=own).create_engine_config()
    assert own == {"backplane": {"memory_share": 0.2}}
    assert [each.scheduler_config.async_scheduling for each in (first, second)] == [True, False]


def test_the_state_travels_with_a_configuration(dense: Path) -> None:
    """vLLM pickles a configuration for its processes, copies it for replicas and replaces parts for draft models."""
    config = by_python(dense, async_scheduling=True).create_engine_config()
    state_of(config).workers_on_host = 3
    for copied in (
        pickle.loads(pickle.dumps(config)),
        copy.deepcopy(config),
        replace(config),
    ):
        assert state_of(copied).explicit_arguments == {"async_scheduling": True, "disable_log_stats": False}
        assert workers_on_host(copied) == 3


def test_a_configuration_without_arguments_has_no_record(dense: Path) -> None:
    by_python(dense, async_scheduling=True).create_engine_config()
    assert state_of(VllmConfig()).explicit_arguments == {}


def test_the_additional_config_is_the_users_alone(dense: Path) -> None:
    assert by_python(dense, async_scheduling=True).create_engine_config().additional_config == {}
