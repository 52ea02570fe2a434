"""Runs vLLM's worker on a Backplane device.

vLLM's `Worker` executes the calls of the executor (load, step, LoRA, profile, weight transfer). The subclass replaces
what assumes CUDA: how the process selects its card, which runner it builds, and how memory is measured.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import get_model_loader
from vllm.platforms import current_platform
from vllm.platforms.interface import set_assigned_physical_gpu_ids
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_backplane.distributed.all_or_none import raise_on_reporting_rank, run_all_or_none
from vllm_backplane.errors import BackplaneError
from vllm_backplane.gguf.file import require_unchanged_files
from vllm_backplane.gguf.hf_config import QUANTIZATION as GGUF
from vllm_backplane.guards import guarded, set_drift, switched_off, use_feature, verify_guards
from vllm_backplane.kv_offload.connector import connector_of_worker
from vllm_backplane.lora import validation
from vllm_backplane.lora.prefetch import AdapterPrefetcher
from vllm_backplane.metrics.steps import StepRecorder
from vllm_backplane.ops import resolution
from vllm_backplane.patches import application
from vllm_backplane.process import start_events
from vllm_backplane.process.rank_failure import exit_unless_output_rank, is_output_rank
from vllm_backplane.process.vllm_torch import bind_torch_of_vllm
from vllm_backplane.runner.factory import make_model_runner
from vllm_backplane.runner.step_graphs import StepGraphs
from vllm_backplane.runtime import configured, runtime
from vllm_backplane.settings import compat
from vllm_backplane.settings.carried_state import workers_on_host
from vllm_backplane.weights import missing_weights, save_check
from vllm_backplane.weights.checkpoint_size import weight_bytes
from vllm_backplane.weights.load_formats import ALL_SHARED
from vllm_backplane.weights.weights_server import OfferedWeights
from vllm_backplane.worker import memory, profiling, recording, sleep
from vllm_backplane.worker.freeze_operators import freeze_operators
from vllm_backplane.worker.kv_cache import KvCacheAllocator
from vllm_backplane.worker.numeric_guard import NumericGuard
from vllm_patchbay.patch import Process

logger = init_logger("vllm." + __name__)


@guarded(
    "vllm.v1.worker.gpu_worker:Worker.__init__",
    "vllm.v1.worker.gpu_worker:Worker.profile",
    why="it creates no profiler, and finds one of Backplane",
)
class BackplaneWorker(Worker):
    """Runs one rank of an engine on a card of the device."""

    recorder: StepRecorder | None = None
    """Records steps for /metrics, after the warm-up, if metrics are on."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        # Patches come before any code of the worker.
        application.apply_patches(runtime().setting("patch_drift"), Process.WORKER)
        with profiling.profiler_hidden_from_vllm(vllm_config):
            super().__init__(vllm_config, *args, **kwargs)
        self.profiler_config = vllm_config.profiler_config
        self.trace: profiling.Trace | None = None
        self.ranges: profiling.ModuleRanges | None = None
        self.runtime = configured(vllm_config.additional_config)
        self.backplane_device = self.runtime.device  # the Device; vLLM's attribute `device` is a torch.device
        self.guard: NumericGuard | None = None
        self.offered_weights: OfferedWeights | None = None
        self.adapter_prefetcher: AdapterPrefetcher | None = None
        compat.register_kernel_overrides(current_platform)
        self.parallel_config.disable_custom_all_reduce = True  # vLLM's custom all-reduce uses CUDA IPC memory

    # --- start ------------------------------------------------------------------------------------------------

    @guarded(
        "vllm.v1.worker.gpu_worker:Worker.init_device",
        why="the device, the process group, the memory budget and the runner are set up here",
    )
    def init_device(self) -> None:
        """Selects the card, loads and freezes the operators, joins the process group, measures memory, and builds the
        runner."""
        if multiprocessing.parent_process() is not None:
            # Imported objects stay alive, and each garbage collection while memory is measured would scan all of them.
            # The user's own process is not frozen, because its objects belong to the user.
            gc.freeze()
        set_drift(self.runtime.setting("patch_drift"))
        verify_guards()
        if self.speculative_config is not None:
            use_feature("speculation")
        if getattr(self.cache_config, "mamba_cache_mode", "none") != "none":
            use_feature("prefix caching of recurrent layers")
        if self.vllm_config.weight_transfer_config is not None:
            use_feature("weight transfer")
        transfer = self.vllm_config.kv_transfer_config
        if transfer is not None and transfer.kv_connector is not None:
            use_feature(transfer.kv_connector)
            for nested in transfer.kv_connector_extra_config.get("connectors", ()):  # those of a MultiConnector
                use_feature(nested.get("kv_connector", ""))
        self.backplane_device.place_worker(self._index_on_host(), self._workers_on_host())
        self.card = self._card()
        self.device = self.backplane_device.torch_device(self.card)
        self.backplane_device.set_current(self.card)
        bind_torch_of_vllm(self.backplane_device, self.card)
        self.sleeper = sleep.Sleeper(self.backplane_device, self.card)
        self._check_copies()
        current_platform.check_if_supports_dtype(self.model_config.dtype)
        freeze_operators(self.backplane_device, self.runtime.setting("reference_ops"))
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        set_random_seed(self.model_config.seed)
        gc.collect()
        self.backplane_device.empty_cache()
        self.budget = memory.Budget.at_start(
            self.backplane_device,
            self.card,
            share=self.cache_config.gpu_memory_utilization,
            workers=self._workers_on_host(),
        )
        self.available_kv_cache_memory_bytes = self._activations = 0  # until they are determined
        logger.info("%s", self.budget.describe())
        compat.build_runner(self)
        verify_guards()  # of the modules of the runner
        budget = self.budget
        self._report_step("memory", total=budget.total, free=budget.free_at_start, allowed=budget.allowed)

    def _report_step(self, step: str, **facts: start_events.Fact) -> None:
        """Reports a step of the start, as the first worker of the server."""
        if self.rank == 0 and not self.parallel_config.data_parallel_index:
            start_events.report(step, **facts)

    def _card(self) -> int:
        """Returns the card of this worker: 0 if all workers share the host's memory, otherwise a card of its own, by
        the same mapping of ranks to cards as in vLLM's own workers."""
        if self.backplane_device.capabilities.host_memory:
            return 0
        parallel = self.parallel_config
        logical = self.local_rank
        if parallel.assigned_physical_gpu_ids is not None:
            # On out-of-tree platforms, vLLM gives each data-parallel replica a list of only its own cards.
            set_assigned_physical_gpu_ids(parallel.assigned_physical_gpu_ids)
        else:
            logical = self._index_on_host()
        card = current_platform.logical_device_id_to_visible_device_id(logical)
        count = self.runtime.selection.probe.count
        if card >= count:
            device = self.backplane_device
            raise BackplaneError(
                f"worker {logical} is to use card {card}, and device {device.name!r} has {count}; lower the parallel "
                f"sizes or correct {device.visible_cards_variable}"
            )
        return int(card)

    def _index_on_host(self) -> int:
        """Returns the index of this worker among all workers of the host, data-parallel replicas included."""
        parallel = self.parallel_config
        replica = parallel.data_parallel_rank_local
        return int(
            self.local_rank + (parallel.data_parallel_index if replica is None else replica) * parallel.world_size
        )

    def _workers_on_host(self) -> int:
        return workers_on_host(self.vllm_config)

    def _check_copies(self) -> None:
        """Turns on the numeric guard's checks of copies, before weights are copied."""
        if "copies" not in self.runtime.setting("numeric_guard"):
            return
        name, reason = self.backplane_device.name, self.backplane_device.check_copies()
        if reason is None:
            logger.info("Numeric guard: copies between the host and device %s are checked.", name)
        else:
            logger.warning("Numeric guard: copies are not checked on device %s: %s.", name, reason)

    @guarded(
        "vllm.v1.worker.gpu_worker:Worker._make_model_runner",
        why="it returns a runner of Backplane",
    )
    def _make_model_runner(self) -> Any:
        return make_model_runner(self.vllm_config, self.device, self.backplane_device)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        expected = None if load_dummy_weights else weight_bytes(self.model_config)
        if expected is None:
            logger.info("The size of the weights is unknown before loading, so it is not checked against the memory.")
        else:
            shards = self.parallel_config.tensor_parallel_size * self.parallel_config.pipeline_parallel_size
            self.budget.refuse_weights(expected // shards)
        if (address := self.runtime.setting("weights_listen")) is not None:
            self.offered_weights = OfferedWeights(self, address)
        self._report_step("weights_begin", bytes=expected)
        with missing_weights.error_with_remedy():
            super().load_model(load_dummy_weights=load_dummy_weights)
        verify_guards()  # of the modules that the model has imported
        for kind in type(self.model_runner.get_model()).__mro__:
            use_feature(kind.__name__)
        # vLLM has just set one host thread for serving, which suits only devices whose host merely launches kernels.
        self.backplane_device.prepare_worker(self._workers_on_host())
        self.adapter_prefetcher = AdapterPrefetcher.create_if_supported(self.vllm_config, self.model_runner)
        if self.model_config.enable_sleep_mode:
            self._preserved_parameters()  # raises for an unknown name now instead of at the first sleep
        if self.offered_weights is not None:
            self.offered_weights.record()
        if self.runtime.guard_checks_modules:
            self.set_numeric_guard("modules" if "modules" in self.runtime.setting("numeric_guard") else "layers")
        self._report_step("weights")

    # --- the numeric guard --------------------------------------------------------------------------------------------

    def set_numeric_guard(self, mode: Literal["off", "layers", "modules"]) -> None:
        """Sets which modules the numeric guard checks from the next step on. Steps run eagerly meanwhile, because a
        replayed graph calls no module."""
        if self.guard is not None:
            self.guard.remove()
            self.guard = None
        if mode != "off":
            name = f"rank {self.rank} on card {self.card} of {self.backplane_device.name}"
            self.guard = NumericGuard(self.model_runner.get_model(), self.device, name, submodules=mode == "modules")
            logger.info("Numeric guard: checks the inputs and outputs of %d modules.", len(self.guard.watched))
        self._update_graph_suspension()

    def _update_graph_suspension(self) -> None:
        """Suspends graphs while the guard or a trace has hooks on modules, and resumes them otherwise."""
        if isinstance(self.model_runner.model, StepGraphs):
            self.model_runner.model.suspended = self.guard is not None or self.ranges is not None

    # --- traces -------------------------------------------------------------------------------------------------------

    def profile(self, is_start: bool = True, profile_prefix: str | None = None, **limits: Any) -> None:
        """Starts or stops vLLM's profiler with ranges for modules. Steps run eagerly meanwhile, so that the trace shows
        their operators."""
        if self.profiler_config.profiler != profiling.KIND:
            super().profile(is_start, profile_prefix, **limits)
            return
        if is_start:
            begin = partial(self._begin_trace, profile_prefix, limits)
            run_all_or_none(self.parallel_config, self.rank, begin, self._drop_trace)
        else:
            run_all_or_none(self.parallel_config, self.rank, self._end_trace, self._drop_ranges)

    def _begin_trace(self, prefix: str | None, limits: Mapping[str, Any]) -> None:
        if self.ranges is not None:
            logger.warning("A trace is already being recorded; it continues.")
            return
        self.trace = profiling.Trace(self.profiler_config, prefix, self.rank, self.local_rank)
        self.profiler = self.trace.profiler
        super().profile(True, prefix, **limits)
        delay = limits.get("delay_iterations")
        self.trace.require_start(delayed=bool(self.profiler_config.delay_iterations if delay is None else delay))
        self.ranges = profiling.ModuleRanges(self.model_runner.get_model())
        self._update_graph_suspension()

    def _end_trace(self) -> None:
        self._drop_ranges()
        if self.trace is None:
            logger.warning("No trace is being recorded.")
            return
        trace, self.trace = self.trace, None
        trace.has_ended()  # records whether the profiler is running
        super().profile(False)
        self.profiler = None
        trace.require_file()

    def _drop_trace(self) -> None:
        """Discards a trace that another worker could not begin."""
        self._drop_ranges()
        if self.profiler is not None:
            self.profiler.stop()
        self.profiler = self.trace = None

    def _drop_ranges(self) -> None:
        if self.ranges is not None:
            self.ranges.remove()
            self.ranges = None
            self._update_graph_suspension()

    def _trace_range(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext() if self.ranges is None else torch.autograd.profiler.record_function(name)

    # --- steps ------------------------------------------------------------------------------------------------

    def _terminating_on_failure(self, operation: str) -> AbstractContextManager[None]:
        """Returns a context that ends this process if it fails on a rank whose exceptions vLLM does not read."""
        return exit_unless_output_rank(self.parallel_config, self.rank, operation)

    def _finish_output(self, output: Any) -> Any:
        """Marks failed requests in the output of a step, and returns it.

        On a rank whose output vLLM drops, later work waits until the output has been copied to the host.
        """
        if not is_output_rank(self.parallel_config, self.rank):
            wait_for_output_copy(output)
        return output if self.adapter_prefetcher is None else self.adapter_prefetcher.mark_output(output)

    def _recorded_forward(self, scheduler_output: SchedulerOutput) -> AbstractContextManager[None]:
        """Returns a context that records the forward pass of a step, if metrics are on and it has tokens."""
        tokens = scheduler_output.total_num_scheduled_tokens
        if self.recorder is None or not tokens:
            return nullcontext()
        return self.recorder.forward(scheduler_output.num_scheduled_tokens, tokens)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        with self._terminating_on_failure("execute_model"), self._recorded_forward(scheduler_output):
            # A step without tokens only removes finished requests.
            if self.ranges is None or not scheduler_output.total_num_scheduled_tokens:
                return self._finish_output(self._run_step(scheduler_output))
            with self._trace_range("step"):
                output = self._finish_output(self._run_step(scheduler_output))
            if self.trace is not None and self.trace.has_ended():  # after the requested number of steps
                self._drop_ranges()
            return output

    @torch.inference_mode()
    def _run_step(self, scheduler_output: SchedulerOutput) -> Any:
        """Loads the LoRA adapters of a step and runs the step. With the numeric guard, raises if a module's output was
        bad."""
        require_unchanged_files()  # the embedding of a GGUF file is read from the file
        if self.adapter_prefetcher is not None:
            self.adapter_prefetcher.prepare(scheduler_output)
        if self.guard is None:
            return super().execute_model(scheduler_output)
        self.guard.raise_if_failed()
        self.guard.begin(scheduler_output.total_num_scheduled_tokens, rows_of_step)
        try:
            output = super().execute_model(scheduler_output)
        except BaseException:
            self.guard.abandon()
            raise
        self.guard.finish(tokens_by_request(self.model_runner, scheduler_output))
        return output

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        """Samples tokens. Raises a fault of the preceding `execute_model` again, because with async scheduling vLLM
        reads the result of this call only."""
        recorded = nullcontext() if self.recorder is None else self.recorder.sample()
        with self._terminating_on_failure("sample_tokens"), recorded, self._trace_range("sample"):
            if self.guard is not None:
                self.guard.raise_if_failed()
            return self._finish_output(super().sample_tokens(grammar_output))

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        with self._terminating_on_failure("take_draft_token_ids"):
            return super().take_draft_token_ids()

    def execute_dummy_batch(self) -> None:
        with self._terminating_on_failure("execute_dummy_batch"):
            require_unchanged_files()  # as `_run_step`: the batch reads the embedding too
            super().execute_dummy_batch()

    # --- adapters ---------------------------------------------------------------------------------------------

    def add_lora(self, lora_request: LoRARequest) -> bool:
        load = super().add_lora
        with recording.card_errors_counted(self.recorder):
            added = validation.add_validated(self.model_runner, lora_request, self.parallel_config, self.rank, load)
        if added and self.adapter_prefetcher is not None:
            self.adapter_prefetcher.clear_failure(lora_request.lora_int_id)
        return added

    # --- changes of weights -----------------------------------------------------------------------------------

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self._begin_weight_change()
        super().reload_weights(*args, **kwargs)
        self._end_weight_change()

    def reset_weights(self) -> None:
        """Sets all weights to zero. No KV block is saved until other weights are loaded."""
        load_format = self.vllm_config.load_config.load_format
        if load_format in ALL_SHARED or self.model_config.quantization == GGUF:
            kind = "a GGUF file" if self.model_config.quantization == GGUF else f"--load-format {load_format}"
            raise BackplaneError(
                f"the weights cannot be set to zero: with {kind} they are mapped from a file, or other servers use "
                "them too; serve a safetensors checkpoint with the default load format"
            )
        reset = getattr(super(), "reset_weights", None)
        if reset is None:
            raise BackplaneError("this vLLM cannot set weights to zero; install vLLM 0.32 or a later release")
        self._begin_weight_change()
        reset()

    def start_weight_update(self) -> None:
        super().start_weight_update()
        self._begin_weight_change()

    def start_draft_weight_update(self) -> None:
        super().start_draft_weight_update()
        self._begin_weight_change()

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._end_weight_change()

    def save_sharded_state(self, *args: Any, **kwargs: Any) -> None:
        if save_check.can_be_saved(self, "save_sharded_state"):
            super().save_sharded_state(*args, **kwargs)

    def save_tensorized_model(self, *args: Any, **kwargs: Any) -> None:
        if save_check.can_be_saved(self, "save_tensorized_model"):
            super().save_tensorized_model(*args, **kwargs)

    def _clear_graphs(self) -> None:
        """Drops captured graphs, because weights may have new addresses. Only graphs that are captured while serving
        can be captured again."""
        model = self.model_runner.model
        if isinstance(model, StepGraphs) and model.captures_while_serving:
            model.clear_graphs()

    def _begin_weight_change(self) -> None:
        """Withdraws the weights that this worker offers to peers, and discards the offloaded KV blocks. If the change
        fails, no block is saved until another change succeeds, because nobody knows which weights there are."""
        if self.offered_weights is not None:
            self.offered_weights.invalidate()
        connector = connector_of_worker()
        if connector is not None:
            connector.begin_weight_change()

    def _end_weight_change(self) -> None:
        self._clear_graphs()
        connector = connector_of_worker()
        if connector is not None:
            connector.end_weight_change()

    # --- memory -----------------------------------------------------------------------------------------------

    @guarded(
        "vllm.v1.worker.gpu_worker:Worker._maybe_get_memory_pool_context",
        why="memory for sleep is that of the device",
    )
    @contextmanager
    def _maybe_get_memory_pool_context(self, tag: str) -> Iterator[None]:
        """Allocates the KV cache through the device, and memory that may sleep in the device's pools. Upstream uses
        CUDA's pools."""
        if tag == sleep.KV_CACHE:
            # The allocator puts only the KV cache into the sleep pool. Other allocations in this context, such as block
            # tables, must survive a sleep.
            context: AbstractContextManager[Any] = self._kv_cache_allocator
        elif tag == sleep.WEIGHTS:
            context = self._sleep_pool(tag)
        else:
            context = nullcontext()
        with context:
            yield

    def _sleep_pool(self, tag: str) -> AbstractContextManager[None]:
        return self.sleeper.pool(tag) if self.model_config.enable_sleep_mode else nullcontext()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self._kv_cache_allocator = KvCacheAllocator(
            self.backplane_device, self.card, self._check_kv_cache_size, partial(self._sleep_pool, sleep.KV_CACHE)
        )
        super().initialize_from_config(kv_cache_config)
        if kv_cache_config.kv_cache_tensors:  # an encoder has no KV cache
            self._kv_cache_allocator.require_use()
        self._report_step("kv_cache", bytes=self._kv_cache_allocator.bytes)
        connector = connector_of_worker()
        if connector is not None:
            connector.bind_model(self.model_runner.get_model())

    def _check_kv_cache_size(self, count: int) -> None:
        """Raises if a KV cache of `count` bytes does not fit. vLLM exceeds the granted size only if the user set the
        number of blocks."""
        if count > self.available_kv_cache_memory_bytes:
            self.budget.kv_cache_bytes(count, self._activations, "--num-gpu-blocks-override")

    @guarded(
        "vllm.v1.worker.gpu_worker:Worker.sleep",
        why="memory is released by the device",
    )
    def sleep(self, level: int = 1) -> None:
        if not self.model_config.enable_sleep_mode:
            return raise_on_reporting_rank(
                self.parallel_config, self.rank, "sleep mode is off; start with --enable-sleep-mode"
            )
        if level == 2 and not hasattr(get_model_loader(self.load_config), "get_all_weights"):
            kind = self.load_config.load_format
            reason = f"level 2 discards the weights, and --load-format {kind} cannot load them again; sleep at level 1"
            return raise_on_reporting_rank(self.parallel_config, self.rank, reason)
        fall_asleep = partial(self._change_memory, partial(self._fall_asleep, level))
        run_all_or_none(self.parallel_config, self.rank, fall_asleep, partial(self._undo_sleep, level))

    def _change_memory(self, change: Callable[[], None]) -> None:
        """Releases or restores memory of the card, and records errors of the card and the memory afterwards."""
        with recording.card_errors_counted(self.recorder):
            change()
        if self.recorder is not None:
            self.recorder.measure_memory()

    def _fall_asleep(self, level: int) -> None:
        self.backplane_device.synchronize()
        before = self.backplane_device.memory(self.card).free
        compat.unregister_kv_caches()
        if level == 2:
            self._begin_weight_change()
        self.sleeper.sleep(level, self._models(), self._preserved_parameters())
        gc.collect()
        self.backplane_device.empty_cache()
        after = self.backplane_device.memory(self.card)
        logger.info("Asleep: %s released, %s still in use.", memory.gib(after.free - before), memory.gib(after.used))

    def _undo_sleep(self, level: int) -> None:
        """Wakes this worker again because it or another one could not sleep."""
        self._wake(None)
        if level == 2:  # the weights may be lost
            self.reload_weights()

    @guarded(
        "vllm.v1.worker.gpu_worker:Worker.wake_up",
        why="memory is restored by the device",
    )
    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wakes all workers. If one fails, the others stay awake, and a second call wakes the rest."""
        run_all_or_none(self.parallel_config, self.rank, partial(self._change_memory, partial(self._wake, tags)))

    def _wake(self, tags: Iterable[str] | None) -> None:
        self.sleeper.wake(tags)
        if tags is None or sleep.KV_CACHE in tags:
            compat.restore_kv_caches()

    @guarded(
        "vllm.v1.worker.gpu_worker:Worker.discard",
        why="memory is released by the device",
    )
    def discard(self, tags: tuple[str, ...]) -> None:
        run_all_or_none(self.parallel_config, self.rank, partial(self._discard, tags))

    def _discard(self, tags: Iterable[str]) -> None:
        sleep.require_known(tags)
        if sleep.KV_CACHE in tags:
            compat.unregister_kv_caches()
        if sleep.WEIGHTS in tags:
            self._begin_weight_change()
        self.sleeper.discard(tags)

    def _models(self) -> list[torch.nn.Module]:
        drafter = getattr(getattr(self.model_runner, "drafter", None), "model", None)
        return [self.model_runner.get_model(), *([drafter] if isinstance(drafter, torch.nn.Module) else [])]

    def _preserved_parameters(self) -> list[torch.nn.Parameter]:
        patterns = getattr(self.model_config, "sleep_preserve_parameter_names", ())  # since vLLM 0.32
        model, *draft = self._models()
        return sleep.preserved_parameters(patterns, model, draft[0] if draft else None)

    @guarded(
        "vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
        why="the budget of Backplane decides about the KV cache",
    )
    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """Returns the bytes for the KV cache: the budget less the memory of the weights and of a largest step."""
        activations = self._activations = self.budget.activation_bytes(self._profile_activations())
        requested = self.cache_config.kv_cache_memory_bytes
        granted = self.budget.kv_cache_bytes(requested, activations)
        logger.info("%s", self.budget.describe_kv_cache(granted, requested, activations))
        self.available_kv_cache_memory_bytes = granted
        return granted

    def _profile_activations(self) -> int:
        """Returns the peak memory of a largest step: measured, or extrapolated where a largest step would take long.

        Sampling and the forward pass do not hold their memory at the same time. The memory of sampling grows with the
        number of sequences, that of the forward pass with the number of tokens. Two short steps of each give the slope.
        """
        limit, largest = self.backplane_device.capabilities.profile_tokens, self.model_runner.max_num_tokens
        if limit is None:
            return self._peak(partial(self.model_runner.profile_step, largest))
        runner = self.model_runner
        # A step of n tokens samples for n sequences.
        sampled = self._peaks(runner.profile_step, min(limit // 2, self.scheduler_config.max_num_seqs))
        forward = self._peaks(runner.profile_forward, min(limit, largest))
        sequences = min(self.scheduler_config.max_num_seqs, largest)
        return max(memory.extrapolate(sampled, sequences), memory.extrapolate(forward, largest))

    def _peaks(self, step: Callable[[int], None], size: int) -> dict[int, int]:
        # The larger step runs first: the first one also includes what stays allocated, and a steeper line errs on the
        # safe side.
        return {tokens: self._peak(partial(step, tokens)) for tokens in (size, max(size // 2, 1))}

    def _peak(self, step: Callable[[], None]) -> int:
        self.backplane_device.reset_peak_memory(self.card)
        before = self.backplane_device.own_memory(self.card)
        with set_current_vllm_config(self.vllm_config), self._terminating_on_failure("profiling"):
            step()
        peak = self.backplane_device.peak_memory(self.card) - before
        gc.collect()
        self.backplane_device.empty_cache()
        return max(peak, 0)

    # --- warm-up ----------------------------------------------------------------------------------------------

    @guarded(
        "vllm.v1.worker.gpu_worker:Worker._compile_or_warm_up_model",
        why="the runner of Backplane warms up",
        versions=">=0.33",
    )
    @guarded("vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model", why="the runner of Backplane warms up")
    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Warms the runner up. Upstream's warm-up is for kernels that are compiled at run time, and imports CUDA models
        to find them. The kernels here are compiled already, and the profiling run has loaded them."""
        with self._terminating_on_failure("warm_up"):
            self.model_runner.warm_up()
        resolution.require_unchanged()
        compat.seed_replica(self.model_config.seed, self.parallel_config.data_parallel_index)
        freeze_gc_heap()
        if self.offered_weights is not None:
            self.offered_weights.start_server()
        if self.recorder is not None:
            self.recorder.remove()
        self.recorder = recording.recorder_of(self)
        self._report_step("warm_up")
        return CompilationTimes(
            language_model=self.compilation_config.compilation_time,
            encoder=self.compilation_config.encoder_compilation_time,
        )

    # --- description ------------------------------------------------------------------------------------------

    def backplane_facts(self) -> dict[str, Any]:
        """Returns the card of this rank, its memory budget, what its operators run on, and the state of patches and
        fast paths, for `collective_rpc`."""
        budget = self.budget
        return {
            "rank": self.rank,
            "card": self.backplane_device.properties(self.card).name,
            "memory": {"total": budget.total, "free_at_start": budget.free_at_start, "allowed": budget.allowed},
            "operators": [asdict(line) for line in resolution.frozen() or ()],
            "patches": application.session().summary(),
            "switched_off": switched_off(),
        }

    # --- end --------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if fell_back := self.backplane_device.fallbacks():
            logger.warning(
                "Operators that ran on the host because device %s lacks them: %s.",
                self.backplane_device.name,
                ", ".join(f"{name} ({count})" for name, count in sorted(fell_back.items())),
            )
        if hasattr(self, "card"):
            self._log_modelled_time()
        if self.recorder is not None:
            self.recorder.remove()
            self.recorder = None
        super().shutdown()

    def modelled_seconds(self) -> float | None:
        """Returns how long the chip that the user described would have been busy so far, for `collective_rpc`."""
        self.backplane_device.synchronize()
        return self.backplane_device.modelled_seconds(self.card)

    def _log_modelled_time(self) -> None:
        try:
            seconds = self.backplane_device.modelled_seconds(self.card)
        except BackplaneError as fault:  # the card failed, and its error was reported before
            logger.warning("The busy time of the modelled chip is unknown: %s", fault)
            return
        if seconds is not None:
            logger.info("The modelled chip would have been busy for %.6f s on card %d.", seconds, self.card)


def wait_for_output_copy(output: Any) -> None:
    """Makes later work on the current stream wait for the copy of an output that vLLM discards.

    vLLM copies an output to the host on a separate stream. On a rank whose output is not read, it drops the output, and
    with it the source tensors, during that copy: their memory would be reused and overwritten. On the output rank the
    reader waits for the copy.
    """
    if not isinstance(output, AsyncModelRunnerOutput):
        return
    for name in ("async_copy_ready_event", "copy_event"):  # of the V1 and of the V2 model runner
        if (event := getattr(output, name, None)) is not None:
            event.wait()
            return
    output.get_output()


def rows_of_step() -> int | None:
    """Returns the tokens of the current forward pass, padding included, or None outside of one."""
    if not is_forward_context_available():
        return None
    described = get_forward_context().batch_descriptor
    return None if described is None else int(described.num_tokens)


def tokens_by_request(runner: Any, scheduled: SchedulerOutput) -> Mapping[str, int] | None:
    """Returns the tokens of each request in the step, in the order of the step's rows, or None if the runner's order is
    unknown."""
    order = getattr(getattr(runner, "input_batch", None), "req_ids", None)
    if order is None or set(order) != set(scheduled.num_scheduled_tokens):
        return None
    return {request: scheduled.num_scheduled_tokens[request] for request in order}
