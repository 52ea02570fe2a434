"""Carries Backplane's private state with a vLLM configuration into every process that receives the configuration.

vLLM pickles its configuration for engines and workers, copies it for data-parallel replicas and replaces parts of it
for draft models. The state is an attribute of the scheduler's configuration: pickling and copying keep attributes, and
vLLM never replaces that part. The user's ``additional_config`` stays as the user wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_backplane.settings.explicit_arguments import take_recorded

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_ATTRIBUTE = "_backplane_state"


@dataclass(slots=True)
class CarriedState:
    """Holds the private state of one vLLM configuration."""

    explicit_arguments: Mapping[str, Any]
    """Engine arguments that the user gave, of those in `explicit_arguments.WATCHED`, and `disable_log_stats`."""
    workers_on_host: int | None = None
    """Number of workers of all data-parallel replicas on this host. It is kept here because vLLM removes the number of
    replicas from the configuration of a dense model's replica."""
    graphs_by_default: bool = False
    """Whether decode steps are captured by the device's default rather than at the user's request."""
    metrics_folder: str | None = None
    """Name of the folder in which workers and schedulers publish metrics (`metrics/folder.py`), or a pattern of such
    names in an API server that did not start the engines; None if metrics are off."""


def state_of(config: VllmConfig) -> CarriedState:
    """Returns the state of a configuration; the first call attaches a new one."""
    carrier = config.scheduler_config
    state: CarriedState | None = vars(carrier).get(_ATTRIBUTE)
    if state is None:
        state = CarriedState(take_recorded())
        setattr(carrier, _ATTRIBUTE, state)
    return state


def workers_on_host(config: VllmConfig) -> int:
    """Returns how many workers share this host, all data-parallel replicas counted."""
    return state_of(config).workers_on_host or config.parallel_config.local_world_size
