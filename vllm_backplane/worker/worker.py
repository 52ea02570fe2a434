"""The worker: vLLM's own, except where it assumes CUDA.

vLLM's `Worker` carries out the executors' calls (load, step, LoRA, profile, weight transfer); what differs on
other hardware is how the process gets hold of its card, which runner it builds, and how memory is counted.
"""

from __future__ import annotations

import gc
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_backplane.errors import BackplaneError
from vllm_backplane.ops import resolution
from vllm_backplane.patch import Process, lifecycle
from vllm_backplane.runtime import configured
from vllm_backplane.worker import memory
from vllm_backplane.worker.host_stand_ins import answer_for
from vllm_backplane.worker.kv_storage import KvCacheStorage
from vllm_backplane.worker.model_runner import make_model_runner

logger = init_logger("vllm." + __name__)


class BackplaneWorker(Worker):
    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.runtime = configured(vllm_config.additional_config)
        self.accelerator = self.runtime.device
        lifecycle.start(self.runtime.setting("patch_drift"), Process.WORKER)
        self.parallel_config.disable_custom_all_reduce = True  # vLLM's is CUDA inter-process memory

    # --- start ------------------------------------------------------------------------------------------------

    def init_device(self) -> None:
        """Take the card, load and freeze the operators, join the group, measure memory, build the runner."""
        self.card = self._card()
        self.device = self.accelerator.torch_device(self.card)
        self.accelerator.set_current(self.card)
        answer_for(self.accelerator, self.card)
        current_platform.check_if_supports_dtype(self.model_config.dtype)
        self._freeze_operators()
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        set_random_seed(self.model_config.seed)
        gc.collect()
        self.accelerator.empty_cache()
        self.budget = memory.Budget.at_start(
            self.accelerator,
            self.card,
            share=self.cache_config.gpu_memory_utilization,
            workers=self._workers_on_host(),
        )
        logger.info("%s", self.budget.describe())
        self._init_workspace_and_model_runner()

    def _card(self) -> int:
        """Workers of one host that share its memory all sit on the same card; others each take their own."""
        if self.accelerator.capabilities.host_memory:
            return 0
        local = self.local_rank
        if self.parallel_config.data_parallel_size > 1 and self.parallel_config.data_parallel_rank_local:
            local += self.parallel_config.data_parallel_rank_local * self.parallel_config.world_size
        count = self.runtime.selection.probe.count
        if local >= count:
            raise BackplaneError(f"worker {local} finds no card: device {self.accelerator.name!r} has {count}")
        return local

    def _workers_on_host(self) -> int:
        return self.parallel_config.local_world_size * max(self.parallel_config.data_parallel_size_local, 1)

    def _freeze_operators(self) -> None:
        if resolution.frozen() is not None:
            return
        self.accelerator.load_kernels()
        table = resolution.resolve(
            self.accelerator.dispatch_key,
            self.accelerator.kernel_provider(),
            self.runtime.setting("reference_ops"),
        )
        resolution.freeze(table)
        kernels = sum(line.implementation == "kernel" for line in table)
        logger.info(
            "Operators on device %s: %d by kernel, %d by reference; 'vllm-backplane ops' lists them.",
            self.accelerator.name,
            kernels,
            len(table) - kernels,
        )
        for problem, remedy in self.accelerator.problems():
            logger.warning("%s. Remedy: %s.", problem, remedy)

    def _make_model_runner(self) -> Any:
        return make_model_runner(self.vllm_config, self.device, self.accelerator)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)
        # vLLM has just set one host thread for serving, which is right where the host only launches.
        self.accelerator.prepare_worker(self._workers_on_host())

    # --- memory -----------------------------------------------------------------------------------------------

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        """Upstream's pools are CUDA's. The KV cache comes from the device."""
        return KvCacheStorage(self.accelerator, self.card) if tag == "kv_cache" else nullcontext()

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """Bytes for the KV cache: the share allowed at start, less what weights and a largest step take."""
        activations = self._profile_activations()
        asked = self.cache_config.kv_cache_memory_bytes
        granted = self.budget.kv_cache_bytes(asked, activations)
        logger.info("%s", self.budget.describe_kv_cache(granted, asked, activations))
        self.available_kv_cache_memory_bytes = granted
        return granted

    def _profile_activations(self) -> int:
        """Peak memory of a largest step: measured, or, where computing one would take long, extrapolated from two."""
        limit, largest = self.accelerator.capabilities.profile_tokens, self.model_runner.max_num_tokens
        if limit is None:
            return self._profile_peak(largest)
        # Both steps sample for every sequence there may be, so the difference is the tokens' alone.
        small = min(max(limit, self.scheduler_config.max_num_seqs), largest)
        large = min(2 * small, largest)
        first, second = self._profile_peak(small), self._profile_peak(large)
        return memory.extrapolate({small: first, large: second}, largest)

    def _profile_peak(self, tokens: int) -> int:
        self.accelerator.reset_peak_memory(self.card)
        before = self.accelerator.own_memory(self.card)
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.profile_step(tokens)
        peak = self.accelerator.peak_memory(self.card) - before
        gc.collect()
        self.accelerator.empty_cache()
        return max(peak, 0)

    # --- warm-up ----------------------------------------------------------------------------------------------

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Upstream's warm-up is for kernels compiled at run time and imports CUDA models to find them; ours are
        compiled, and the profiling run has touched them."""
        self.model_runner.warm_up()
        set_random_seed(self.model_config.seed, self.parallel_config.data_parallel_index)
        freeze_gc_heap()
        return CompilationTimes(
            language_model=self.compilation_config.compilation_time,
            encoder=self.compilation_config.encoder_compilation_time,
        )

    # --- end --------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        logger.debug("Worker %d (process %d) ends.", self.rank, os.getpid())
        super().shutdown()
