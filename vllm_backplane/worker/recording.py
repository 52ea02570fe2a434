"""Creates the recorder of a worker's steps, which /metrics shows (`metrics/steps.py`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger

from vllm_backplane.config.graphs import decode_query_len
from vllm_backplane.metrics import folder, steps
from vllm_backplane.runner.step_graphs import StepGraphs
from vllm_backplane.settings.carried_state import state_of, workers_on_host

logger = init_logger("vllm." + __name__)


def recorder_of(worker: Any) -> steps.StepRecorder | None:
    """Returns the recorder of a worker that has warmed up, or None if metrics are off."""
    config: VllmConfig = worker.vllm_config
    name = state_of(config).metrics_folder
    if name is None:
        return None
    at = folder.existing(name)
    if at is None:
        logger.info(
            "/metrics has no values of rank %d: its worker is on another host than the API server.", worker.rank
        )
        return None
    rank = folder.first_rank(config.parallel_config) + worker.rank
    try:
        return steps.StepRecorder(
            at / f"worker-{rank}",
            rank,
            worker.model_runner,
            worker.backplane_device,
            worker.card,
            _modes(worker, config),
            worker.runtime.setting("operator_sampling"),
            lambda: worker.guard is not None or worker.ranges is not None,
        )
    except OSError as fault:
        logger.error("/metrics has no values of rank %d: %s", rank, fault)
        return None


def card_errors_counted(recorder: steps.StepRecorder | None) -> AbstractContextManager[None]:
    """Returns a context that counts an error of the card, if metrics are on."""
    return nullcontext() if recorder is None else recorder.card_errors_counted()


def _modes(worker: Any, config: VllmConfig) -> steps.Modes:
    model = worker.model_runner.model
    graphs = model if isinstance(model, StepGraphs) else None
    reason: str | None = steps.GRAPHS_OFF
    if graphs is None and config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
        reason = None  # a device's own runner has graphs of its own
    elif config.lora_config is not None:
        reason = steps.LORA
    elif max(config.parallel_config.world_size_across_dp, workers_on_host(config)) > 1:
        reason = steps.SEVERAL_WORKERS
    return steps.Modes(graphs, reason, decode_query_len(config))
