"""Runs vLLM's V1 model runner on a Backplane device. This runner needs no Triton.

The subclass adds the decode fast path, graphs of decode steps, operators for sampling and masks, and profiling steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_backplane import ops
from vllm_backplane.config import graphs
from vllm_backplane.device import Device
from vllm_backplane.guards import guarded, is_switched_off
from vllm_backplane.layers.mamba import refuse_unsupported_state_layers
from vllm_backplane.ops import resolution
from vllm_backplane.runner.decode_inputs import DecodeInputs
from vllm_backplane.runner.grammar import masks_on_device
from vllm_backplane.runner.sampler import replace_sampler
from vllm_backplane.runner.step_graphs import StepGraphs, uncapturable


@guarded(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.__init__",
    why="it creates the samplers that are replaced, and what is read here",
    feature="V1 model runner",
    mentions=(
        "sampler",
        "rejection_sampler",
        "execute_model_state",
        "intermediate_tensors",
        "discard_request_mask",
        "runner_only_attn_layers",
    ),
)
@guarded(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_run",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.profile_run",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._kv_cache_spec_attn_group_iterator",
    why="steps for profiling and warm-up, and the KV caches to zero, come from it",
    feature="V1 model runner",
)
class BackplaneModelRunnerV1(GPUModelRunner):
    """Runs the steps of a worker: vLLM's V1 model runner with Backplane's decode fast path, step graphs and sampler."""

    max_num_tokens: int
    model: Any
    decode_inputs: DecodeInputs | None = None
    decode_metadata: Any = None
    is_prepared_decode = False
    """`decode_inputs` wrote the inputs of the step that is being prepared."""
    forward_began = 0.0
    """Time at which the last step called the model, which ends the preparation of its inputs. Metrics show it."""

    def __init__(self, vllm_config: VllmConfig, torch_device: torch.device, device: Device) -> None:
        self.backplane_device = device  # vLLM's attribute `device` is a torch.device
        super().__init__(vllm_config, torch_device)
        replace_sampler(self)

    def profile_step(self, tokens: int) -> None:
        """Runs upstream's profiling step with `tokens` tokens."""
        largest, self.max_num_tokens = self.max_num_tokens, tokens
        try:
            self.profile_run()
        finally:
            self.max_num_tokens = largest
            # This buffer between pipeline stages was made for `tokens`; warm_up makes it again.
            self.intermediate_tensors = None

    def profile_forward(self, tokens: int) -> None:
        """Runs only the forward pass of a profiling step, with `tokens` tokens."""
        self._dummy_run(tokens, is_profile=True)
        self._sync_device()

    def warm_up(self) -> None:
        """Runs a step of one token, and captures graphs unless they are off or captured while serving."""
        self._dummy_run(1, skip_eplb=True)
        _compile_ngram_lookup(self)
        if (
            self.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
            and not self.backplane_device.capabilities.capture_computes
        ):
            self.capture_model()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        refuse_unsupported_state_layers(self.compilation_config.static_forward_context.values())
        if type(self.model) is CUDAGraphWrapper:
            config, device, model = self.vllm_config, self.backplane_device, self.model.unwrap()
            missing = [] if device.capabilities.capture_computes else uncapturable(model, resolution.frozen() or ())
            has_graphs = graphs.finalize_graphs(config, device, missing)
            self.model = StepGraphs(model, config, device, self.device.index or 0) if has_graphs else model
        self.decode_inputs = None if is_switched_off("decode steps") else DecodeInputs.create_if_supported(self)
        if self.decode_inputs is not None:
            # A late import: it imports every attention backend, and another vLLM may lack what one of them needs.
            from vllm_backplane.runner.decode_metadata import DecodeMetadataCache

            self.decode_metadata = DecodeMetadataCache(self)

    @guarded(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.__init__",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
        why="the buffers of a decode step are written by numpy instead",
        fast_path="decode steps",
        versions=">=0.32",
    )
    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        prepared = self.decode_inputs.prepare(num_scheduled_tokens) if self.decode_inputs is not None else None
        self.is_prepared_decode = prepared is not None
        return super()._prepare_inputs(scheduler_output, num_scheduled_tokens) if prepared is None else prepared

    @guarded(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._determine_batch_execution_and_padding",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._is_uniform_decode",
        "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.dispatch",
        "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher._create_padded_batch_descriptor",
        why="its result is kept for later decode steps",
        fast_path="decode steps",
        versions=">=0.32",
    )
    def _determine_batch_execution_and_padding(self, *args: Any, **sizes: Any) -> Any:
        make = partial(super()._determine_batch_execution_and_padding, *args, **sizes)
        return self.decode_metadata.mode(make, sizes) if self.is_prepared_decode else make()

    @guarded(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_slot_mappings",
        why="its result is kept for later decode steps",
        fast_path="decode steps",
        versions=">=0.32",
    )
    def _get_slot_mappings(self, *args: Any, **sizes: Any) -> Any:
        make = partial(super()._get_slot_mappings, *args, **sizes)
        return self.decode_metadata.slots(make, sizes) if self.is_prepared_decode else make()

    @guarded(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
        "vllm.v1.worker.block_table:BlockTable.get_device_tensor",
        "vllm.v1.worker.utils:AttentionGroup.build_metadata",
        "vllm.v1.worker.utils:AttentionGroup._with_kernel_block_table",
        "vllm.v1.worker.utils:AttentionGroup.get_metadata_builder",
        why="its result is kept for later decode steps",
        fast_path="decode steps",
        versions=">=0.32",
    )
    def _build_attention_metadata(self, *args: Any, **sizes: Any) -> Any:
        make = partial(super()._build_attention_metadata, *args, **sizes)
        # This is vLLM's last call while it prepares a step. The next forward pass may be no prepared decode step.
        is_prepared, self.is_prepared_decode = self.is_prepared_decode, False
        return self.decode_metadata.attention(make, sizes) if is_prepared else make()

    @guarded(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward",
        why="the time of its call is recorded",
    )
    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.forward_began = time.perf_counter()
        return super()._model_forward(*args, **kwargs)

    @guarded(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
        why="it gets no masks of structured output where an operator has applied them",
    )
    def sample_tokens(self, grammar_output: Any) -> Any:
        state = self.execute_model_state
        if grammar_output is not None and state is not None and not state.logits.is_cpu:
            drafts = state.scheduler_output.scheduled_spec_decode_tokens
            masks = masks_on_device(state.logits.device, grammar_output, self.input_batch.req_ids, drafts)
            ops.allowed_tokens_mask.call(state.logits, masks)
            grammar_output = None  # upstream uses it only to apply the masks
        return super().sample_tokens(grammar_output)

    @guarded(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
        why="it gets no generators of requests whose prompt is only partly computed",
    )
    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        with self._generators_of_partial_prefills_removed():
            return super()._sample(*args, **kwargs)

    @guarded(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
        why="it rewinds no generators of requests whose prompt is only partly computed",
    )
    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        with self._generators_of_partial_prefills_removed():
            return super()._bookkeeping_sync(*args, **kwargs)

    @guarded(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._to_list",
        why="tokens that are on the host already are not copied",
    )
    def _to_list(self, sampled_token_ids: torch.Tensor) -> list[list[int]]:
        """Returns the sampled tokens without upstream's copy to the host if they are on the host already."""
        return sampled_token_ids.tolist() if sampled_token_ids.is_cpu else super()._to_list(sampled_token_ids)

    @contextmanager
    def _generators_of_partial_prefills_removed(self) -> Iterator[None]:
        """Removes the random generators of requests whose prompt is only partly computed, while tokens are sampled.

        The sampled token of such a request is discarded. Upstream draws it nevertheless, and then rewinds the request's
        generator by an offset, which works for CUDA's generators only. Here the generator is not drawn from, so a seed
        gives the same tokens however chunked prefill splits the prompt.
        """
        generators = self.input_batch.generators
        if not generators:
            yield
            return
        discarded = numpy.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0].tolist()
        removed = {row: generators.pop(row) for row in discarded if row in generators}
        try:
            yield
        finally:
            generators.update(removed)

    @guarded(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sync_device",
        why="the device of Backplane is synchronized instead",
    )
    def _sync_device(self) -> None:
        self.backplane_device.synchronize()

    @guarded(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._init_kv_zero_meta",
        why="it prepares addresses for a Triton kernel that is not launched",
    )
    def _init_kv_zero_meta(self) -> None:
        """Does nothing. Upstream prepares raw addresses for a Triton kernel, and `_zero_block_ids` needs none."""

    @guarded(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._zero_block_ids",
        why="an operator sets KV blocks to zero",
    )
    def _zero_block_ids(self, block_ids: list[int]) -> None:
        ids = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        for cache in self._caches_to_zero():
            ops.kv_cache_zero_blocks.call(cache, ids)

    def _caches_to_zero(self) -> list[torch.Tensor]:
        """Returns the KV caches of the attention layers, each once although layers may share one."""
        found: dict[int, torch.Tensor] = {}
        for group in self._kv_cache_spec_attn_group_iterator():
            for name in group.layer_names:
                if name in self.runner_only_attn_layers:
                    continue
                cache = self.compilation_config.static_forward_context[name].kv_cache
                if isinstance(cache, torch.Tensor):
                    found.setdefault(cache.data_ptr(), cache)
        return list(found.values())


@guarded(
    "vllm.v1.spec_decode.ngram_proposer:NgramProposer.propose",
    why="it is called once at the start, to compile its lookup",
    feature="speculation",
)
def _compile_ngram_lookup(runner: BackplaneModelRunnerV1) -> None:
    """Compiles the n-gram lookup of speculative decoding at start-up.

    numba compiles the lookup at its first call. vLLM intends to trigger that at start-up, but performs no lookup then,
    so the first request would wait for the compilation.
    """
    speculative = runner.speculative_config
    if speculative is None or speculative.method != "ngram" or not hasattr(runner, "drafter"):
        return
    batch, sampled = runner.input_batch, [[0]]
    runner.drafter.propose(speculative.num_speculative_tokens, sampled, batch.num_tokens_no_spec, batch.token_ids_cpu)
