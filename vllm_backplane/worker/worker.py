"""The worker: vLLM's own, except where it assumes CUDA.

vLLM's `Worker` carries out the executors' calls (load, step, LoRA, profile, weight transfer); what differs on
other hardware is how the process gets hold of its card, which runner it builds, and how memory is counted.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import get_model_loader
from vllm.platforms import current_platform
from vllm.platforms.interface import set_assigned_physical_gpu_ids
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_backplane.config import graphs
from vllm_backplane.distributed.all_or_none import refuse, together
from vllm_backplane.errors import BackplaneError
from vllm_backplane.kv_offload.registration import connector_of_worker
from vllm_backplane.lora import adapters
from vllm_backplane.lora.prefetch import StepAdapters
from vllm_backplane.ops import resolution
from vllm_backplane.patches import lifecycle
from vllm_backplane.process.cuda_shims import answer_for
from vllm_backplane.process.rank_failure import insist_on_being_heard, is_heard, order_after_copy
from vllm_backplane.runner.decode_graphs import StepGraphs
from vllm_backplane.runner.factory import make_model_runner
from vllm_backplane.runner.step import rows_of_step, tokens_by_request
from vllm_backplane.runtime import configured, runtime
from vllm_backplane.settings import compat
from vllm_backplane.settings.carried_state import workers_on_host
from vllm_backplane.weights import missing_weights, saving
from vllm_backplane.weights.checkpoint_size import weight_bytes
from vllm_backplane.weights.peer_server import OfferedWeights
from vllm_backplane.worker import memory, profiling, sleep
from vllm_backplane.worker.kv_cache import KvCacheStorage
from vllm_backplane.worker.numeric_guard import NumericGuard
from vllm_backplane.worker.operators import freeze_operators
from vllm_patchbay.patch import Process

logger = init_logger("vllm." + __name__)


class BackplaneWorker(Worker):
    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        lifecycle.start(runtime().setting("patch_drift"), Process.WORKER)  # before anything of the worker runs
        with profiling.unseen_by_vllm(vllm_config):
            super().__init__(vllm_config, *args, **kwargs)
        self.profiler_config = vllm_config.profiler_config
        self.trace: profiling.Trace | None = None
        self.ranges: profiling.ModuleRanges | None = None
        self.runtime = configured(vllm_config.additional_config)
        self.accelerator = self.runtime.device
        self.guard: NumericGuard | None = None
        self.offered_weights: OfferedWeights | None = None
        self.step_adapters: StepAdapters | None = None
        compat.ask_for_kernel_overrides(current_platform)
        self.parallel_config.disable_custom_all_reduce = True  # vLLM's is CUDA inter-process memory

    # --- start ------------------------------------------------------------------------------------------------

    def init_device(self) -> None:
        """Take the card, load and freeze the operators, join the group, measure memory, build the runner."""
        if multiprocessing.parent_process() is not None:
            # What was imported stays: the collections that measuring memory asks for would each walk through all of it.
            # In a process of the user's own, what is there is not ours to keep.
            gc.freeze()
        self.accelerator.place_worker(self._index_on_host(), self._workers_on_host())
        self.card = self._card()
        self.device = self.accelerator.torch_device(self.card)
        self.accelerator.set_current(self.card)
        answer_for(self.accelerator, self.card)
        self.sleeper = sleep.Sleeper(self.accelerator, self.card)
        self._check_copies()
        current_platform.check_if_supports_dtype(self.model_config.dtype)
        freeze_operators(self.accelerator, self.runtime.setting("reference_ops"))
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
        self.available_kv_cache_memory_bytes = self._activations = 0  # until they are determined
        logger.info("%s", self.budget.describe())
        compat.build_runner(self)

    def _card(self) -> int:
        """Workers of one host that share its memory all sit on the same card; others each take their own, through the
        same mapping of ranks to cards as vLLM's own workers."""
        if self.accelerator.capabilities.host_memory:
            return 0
        parallel = self.parallel_config
        logical = self.local_rank
        if parallel.assigned_physical_gpu_ids is not None:
            # For platforms other than its own, vLLM gives each data-parallel replica a list of its cards alone.
            set_assigned_physical_gpu_ids(parallel.assigned_physical_gpu_ids)
        else:
            logical = self._index_on_host()
        card = current_platform.logical_device_id_to_visible_device_id(logical)
        count = self.runtime.selection.probe.count
        if card >= count:
            raise BackplaneError(
                f"worker {logical} is to use card {card}, and device {self.accelerator.name!r} has {count}; lower the "
                f"parallel sizes or correct {self.accelerator.visible_cards_variable}"
            )
        return int(card)

    def _index_on_host(self) -> int:
        """This worker's number among all of the host's, those of data-parallel replicas included."""
        parallel = self.parallel_config
        replica = parallel.data_parallel_rank_local
        return int(
            self.local_rank + (parallel.data_parallel_index if replica is None else replica) * parallel.world_size
        )

    def _workers_on_host(self) -> int:
        return workers_on_host(self.vllm_config)

    def _check_copies(self) -> None:
        """Before weights are copied."""
        if "copies" not in self.runtime.setting("numeric_guard"):
            return
        reason = self.accelerator.check_copies()
        if reason is None:
            logger.info("Numeric guard: copies between the host and device %s are checked.", self.accelerator.name)
        else:
            logger.warning("Numeric guard: copies are not checked on device %s: %s.", self.accelerator.name, reason)

    def _make_model_runner(self) -> Any:
        return make_model_runner(self.vllm_config, self.device, self.accelerator)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        expected = None if load_dummy_weights else weight_bytes(self.model_config)
        if expected is None:
            logger.info("The weights' size is not known before they are loaded, so it is not held against the memory.")
        else:
            shards = self.parallel_config.tensor_parallel_size * self.parallel_config.pipeline_parallel_size
            self.budget.refuse_weights(expected // shards)
        if (address := self.runtime.setting("weights_listen")) is not None:
            self.offered_weights = OfferedWeights(self, address)
        with missing_weights.remedy_named():
            super().load_model(load_dummy_weights=load_dummy_weights)
        # vLLM has just set one host thread for serving, which is right where the host only launches.
        self.accelerator.prepare_worker(self._workers_on_host())
        self.step_adapters = StepAdapters.of(self.vllm_config, self.model_runner)
        if self.model_config.enable_sleep_mode:
            self._preserved_parameters()  # a name that is none is refused now rather than at the first sleep
        if self.offered_weights is not None:
            self.offered_weights.note()
        if graphs.guard_checks_modules(self.runtime):
            self.watch("modules" if "modules" in self.runtime.setting("numeric_guard") else "layers")

    # --- the numeric guard --------------------------------------------------------------------------------------------

    def watch(self, what: Literal["off", "layers", "modules"]) -> None:
        """Look at the model's modules from the next step on. Steps are eager meanwhile: a replay calls no module."""
        if self.guard is not None:
            self.guard.remove()
            self.guard = None
        if what != "off":
            place = f"rank {self.rank} on card {self.card} of {self.accelerator.name}"
            self.guard = NumericGuard(self.model_runner.get_model(), self.device, place, parts=what == "modules")
            logger.info("Numeric guard: looks at what goes into and comes out of %d modules.", len(self.guard.borders))
        self._suspend_graphs()

    def _suspend_graphs(self) -> None:
        """While something is hooked to modules."""
        if isinstance(self.model_runner.model, StepGraphs):
            self.model_runner.model.suspended = self.guard is not None or self.ranges is not None

    # --- traces -------------------------------------------------------------------------------------------------------

    def profile(self, is_start: bool = True, profile_prefix: str | None = None, **limits: Any) -> None:
        """vLLM's, with ranges of modules. Steps are eager meanwhile, so that the trace has their operators."""
        if self.profiler_config.profiler != profiling.KIND:
            super().profile(is_start, profile_prefix, **limits)
            return
        if is_start:
            begin = partial(self._begin_trace, profile_prefix, limits)
            together(self.parallel_config, self.rank, begin, self._drop_trace)
        else:
            together(self.parallel_config, self.rank, self._end_trace, self._drop_ranges)

    def _begin_trace(self, prefix: str | None, limits: Mapping[str, Any]) -> None:
        if self.ranges is not None:
            logger.warning("A trace is being taken already; it goes on.")
            return
        self.trace = profiling.Trace(self.profiler_config, prefix, self.rank, self.local_rank)
        self.profiler = self.trace.profiler
        super().profile(True, prefix, **limits)
        delay = limits.get("delay_iterations")
        self.trace.insist_on_start(delayed=bool(self.profiler_config.delay_iterations if delay is None else delay))
        self.ranges = profiling.ModuleRanges(self.model_runner.get_model())
        self._suspend_graphs()

    def _end_trace(self) -> None:
        self._drop_ranges()
        if self.trace is None:
            logger.warning("No trace is being taken.")
            return
        trace, self.trace = self.trace, None
        trace.ended()  # whether it ever began
        super().profile(False)
        self.profiler = None
        trace.insist_on_file()

    def _drop_trace(self) -> None:
        """One that another worker could not begin."""
        self._drop_ranges()
        if self.profiler is not None:
            self.profiler.stop()
        self.profiler = self.trace = None

    def _drop_ranges(self) -> None:
        if self.ranges is not None:
            self.ranges.remove()
            self.ranges = None
            self._suspend_graphs()

    def _named(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext() if self.ranges is None else torch.autograd.profiler.record_function(name)

    # --- steps ------------------------------------------------------------------------------------------------

    def _heard(self, doing: str) -> AbstractContextManager[None]:
        return insist_on_being_heard(self.parallel_config, self.rank, doing)

    def _told(self, output: Any) -> Any:
        if not is_heard(self.parallel_config, self.rank):
            order_after_copy(output)
        return output if self.step_adapters is None else self.step_adapters.tell(output)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        with self._heard("execute_model"):
            if self.ranges is None or not scheduler_output.total_num_scheduled_tokens:  # requests that ended
                return self._told(self._execute_model(scheduler_output))
            with self._named("step"):
                output = self._told(self._execute_model(scheduler_output))
            if self.trace is not None and self.trace.ended():  # it was for so many steps
                self._drop_ranges()
            return output

    @torch.inference_mode()
    def _execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """A step. With the guard, its results go on only if every module's output was finite."""
        if self.step_adapters is not None:
            self.step_adapters.prepare(scheduler_output)
        if self.guard is None:
            return super().execute_model(scheduler_output)
        self.guard.insist()
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
        """With scheduling ahead, vLLM looks at what became of this call and not of the one before."""
        with self._heard("sample_tokens"), self._named("sample"):
            if self.guard is not None:
                self.guard.insist()
            return self._told(super().sample_tokens(grammar_output))

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        with self._heard("take_draft_token_ids"):
            return super().take_draft_token_ids()

    def execute_dummy_batch(self) -> None:
        with self._heard("execute_dummy_batch"):
            super().execute_dummy_batch()

    # --- adapters ---------------------------------------------------------------------------------------------

    def add_lora(self, lora_request: LoRARequest) -> bool:
        added = adapters.add(self.model_runner, lora_request, self.parallel_config, self.rank, super().add_lora)
        if added and self.step_adapters is not None:
            self.step_adapters.loaded(lora_request.lora_int_id)
        return added

    # --- other weights ----------------------------------------------------------------------------------------

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        super().reload_weights(*args, **kwargs)
        self._forget_graphs()
        self._forget_kept_blocks()

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._forget_graphs()
        self._forget_kept_blocks()

    def save_sharded_state(self, *args: Any, **kwargs: Any) -> None:
        if saving.can_be_saved(self, "save_sharded_state"):
            super().save_sharded_state(*args, **kwargs)

    def save_tensorized_model(self, *args: Any, **kwargs: Any) -> None:
        if saving.can_be_saved(self, "save_tensorized_model"):
            super().save_tensorized_model(*args, **kwargs)

    def _forget_graphs(self) -> None:
        """Weights may lie elsewhere now. Graphs that were captured while serving can be captured again."""
        model = self.model_runner.model
        if isinstance(model, StepGraphs) and model.while_serving:
            model.clear_graphs()

    def _forget_kept_blocks(self) -> None:
        """Of other weights: what others may ask this worker for."""
        if self.offered_weights is not None:
            self.offered_weights.changed()
        tier = connector_of_worker()
        if tier is not None:
            tier.weights_changed()

    # --- memory -----------------------------------------------------------------------------------------------

    @contextmanager
    def _maybe_get_memory_pool_context(self, tag: str) -> Iterator[None]:
        """Upstream's pools are CUDA's. Here the KV cache comes from the device, and what may sleep from its pools."""
        if tag == sleep.KV_CACHE:
            # What else is allocated with it, such as tables of blocks, is not to be lost in a sleep.
            context: AbstractContextManager[Any] = self._kv_storage
        elif tag == sleep.WEIGHTS:
            context = self._sleeping(tag)
        else:
            context = nullcontext()
        with context:
            yield

    def _sleeping(self, tag: str) -> AbstractContextManager[None]:
        return self.sleeper.pool(tag) if self.model_config.enable_sleep_mode else nullcontext()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self._kv_storage = KvCacheStorage(
            self.accelerator, self.card, self._refuse_kv_cache, partial(self._sleeping, sleep.KV_CACHE)
        )
        super().initialize_from_config(kv_cache_config)
        if kv_cache_config.kv_cache_tensors:  # an encoder has none
            self._kv_storage.insist_on_use()
        tier = connector_of_worker()
        if tier is not None:
            tier.bind_model(self.model_runner.get_model())

    def _refuse_kv_cache(self, count: int) -> None:
        """vLLM keeps to what was granted, unless the user stated a number of blocks."""
        if count > self.available_kv_cache_memory_bytes:
            self.budget.kv_cache_bytes(count, self._activations, "--num-gpu-blocks-override")

    def sleep(self, level: int = 1) -> None:
        if not self.model_config.enable_sleep_mode:
            return refuse(self.parallel_config, self.rank, "sleep mode is off; start with --enable-sleep-mode")
        if level == 2 and not hasattr(get_model_loader(self.load_config), "get_all_weights"):
            kind = self.load_config.load_format
            reason = f"level 2 gives the weights up, and --load-format {kind} cannot load them again; sleep at level 1"
            return refuse(self.parallel_config, self.rank, reason)
        together(self.parallel_config, self.rank, partial(self._fall_asleep, level), partial(self._stay_awake, level))

    def _fall_asleep(self, level: int) -> None:
        self.accelerator.synchronize()
        before = self.accelerator.memory(self.card).free
        self.sleeper.sleep(level, self._models(), self._preserved_parameters())
        gc.collect()
        self.accelerator.empty_cache()
        after = self.accelerator.memory(self.card)
        logger.info("Asleep: %s given back, %s still in use.", memory.gib(after.free - before), memory.gib(after.used))

    def _stay_awake(self, level: int) -> None:
        """Another worker, or this one, could not sleep."""
        self.sleeper.wake(None)
        if level == 2:  # which may have cost this one its weights
            self.reload_weights()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Those that could stay awake where one fails, and calling it again wakes the rest."""
        together(self.parallel_config, self.rank, partial(self.sleeper.wake, tags))

    def discard(self, tags: tuple[str, ...]) -> None:
        together(self.parallel_config, self.rank, partial(self.sleeper.discard, tags))

    def _models(self) -> list[torch.nn.Module]:
        drafter = getattr(getattr(self.model_runner, "drafter", None), "model", None)
        return [self.model_runner.get_model(), *([drafter] if isinstance(drafter, torch.nn.Module) else [])]

    def _preserved_parameters(self) -> list[torch.nn.Parameter]:
        patterns = getattr(self.model_config, "sleep_preserve_parameter_names", ())  # since vLLM 0.32
        model, *draft = self._models()
        return sleep.preserved_parameters(patterns, model, draft[0] if draft else None)

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """Bytes for the KV cache: the share allowed at start, less what weights and a largest step take."""
        activations = self._activations = self.budget.reserve(self._profile_activations())
        asked = self.cache_config.kv_cache_memory_bytes
        granted = self.budget.kv_cache_bytes(asked, activations)
        logger.info("%s", self.budget.describe_kv_cache(granted, asked, activations))
        self.available_kv_cache_memory_bytes = granted
        return granted

    def _profile_activations(self) -> int:
        """Peak memory of a largest step: measured, or, where computing one would take long, put together.

        The parts are not held at the same time. Sampling grows with the number of sequences, the forward pass with that
        of tokens, and two short steps of each show how.
        """
        limit, largest = self.accelerator.capabilities.profile_tokens, self.model_runner.max_num_tokens
        if limit is None:
            return self._peak(partial(self.model_runner.profile_step, largest))
        runner = self.model_runner
        # A step of n tokens samples for n sequences.
        sampled = self._peaks(runner.profile_step, min(limit // 2, self.scheduler_config.max_num_seqs))
        forward = self._peaks(runner.forward_step, min(limit, largest))
        sequences = min(self.scheduler_config.max_num_seqs, largest)
        return max(memory.extrapolate(sampled, sequences), memory.extrapolate(forward, largest))

    def _peaks(self, step: Callable[[int], None], size: int) -> dict[int, int]:
        # The larger first: the first step also pays for what stays allocated, and a steeper line errs to the safe side.
        return {tokens: self._peak(partial(step, tokens)) for tokens in (size, max(size // 2, 1))}

    def _peak(self, step: Callable[[], None]) -> int:
        self.accelerator.reset_peak_memory(self.card)
        before = self.accelerator.own_memory(self.card)
        with set_current_vllm_config(self.vllm_config), self._heard("profiling"):
            step()
        peak = self.accelerator.peak_memory(self.card) - before
        gc.collect()
        self.accelerator.empty_cache()
        return max(peak, 0)

    # --- warm-up ----------------------------------------------------------------------------------------------

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Upstream's warm-up is for kernels compiled at run time and imports CUDA models to find them; ours are
        compiled, and the profiling run has touched them."""
        with self._heard("warm_up"):
            self.model_runner.warm_up()
        resolution.insist_unchanged()
        compat.seed_replica(self.model_config.seed, self.parallel_config.data_parallel_index)
        freeze_gc_heap()
        if self.offered_weights is not None:
            self.offered_weights.begin()
        return CompilationTimes(
            language_model=self.compilation_config.compilation_time,
            encoder=self.compilation_config.encoder_compilation_time,
        )

    # --- end --------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if fell_back := self.accelerator.fallbacks():
            logger.warning(
                "On the host, because device %s lacks them: %s.",
                self.accelerator.name,
                ", ".join(f"{name} ({count})" for name, count in sorted(fell_back.items())),
            )
        if hasattr(self, "card"):
            self._tell_modelled_time()
        super().shutdown()

    def modelled_seconds(self) -> float | None:
        """For `collective_rpc`: how long the chip that the user described would have been busy with all done so far."""
        self.accelerator.synchronize()
        return self.accelerator.modelled_seconds(self.card)

    def _tell_modelled_time(self) -> None:
        try:
            seconds = self.accelerator.modelled_seconds(self.card)
        except BackplaneError as fault:  # of a card that is gone; there was an error about that
            logger.warning("How long the modelled chip was busy is not known: %s", fault)
            return
        if seconds is not None:
            logger.info("The modelled chip would have been busy for %.6f s on card %d.", seconds, self.card)
