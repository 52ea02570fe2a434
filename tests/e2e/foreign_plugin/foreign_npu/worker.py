"""Implements a worker that generates token 7 for every request, without a model."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

TOKEN = 7


class ForeignWorker(WorkerBase):
    def init_device(self) -> None:
        self.device = torch.device("cpu")

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        pass

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return {"layer": FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]

    def set_kv_cache_layout(self, *layout: Any) -> None:
        pass

    def determine_available_memory(self) -> int:
        return 1 << 22

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        pass

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput:
        requests = list(scheduler_output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=requests,
            req_id_to_index={request: index for index, request in enumerate(requests)},
            sampled_token_ids=[[TOKEN] for _ in requests],
        )

    def sample_tokens(self, grammar_output: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"ForeignWorker has no {name}")
