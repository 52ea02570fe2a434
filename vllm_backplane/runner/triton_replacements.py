"""Replaces the Triton kernels of vLLM's V1 model runner by operators.

vLLM launches these kernels on every platform, and offers one hook to replace them: its kernel dispatcher. The
dispatcher drops the launch grid, so a replacement takes sizes from tensors and scalars. Arguments are bound by name,
because between vLLM releases the kernels gain, lose and reorder arguments. A required parameter of a replacement must
exist in every supported vLLM; an optional one may be absent.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from vllm_backplane import ops
from vllm_backplane.errors import BindingError, OperatorError, nearest
from vllm_backplane.guards import guarded
from vllm_backplane.settings import compat
from vllm_backplane.settings.releases import INSTALL_SUPPORTED

Launch = Callable[..., None]


@guarded("vllm.v1.worker.block_table:ComputeSlotMappingKernel.kernel", why="an operator replaces the kernel")
def _slot_mapping(
    *,
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    slot_mapping_ptr: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    block_size: int | None = None,  # until vLLM 0.31: the size of the table's blocks
) -> None:
    ops.compute_slot_mapping(
        query_start_loc_ptr,
        positions_ptr[:num_tokens],
        block_table_ptr,
        slot_mapping_ptr[:max_num_tokens],
        KV_CACHE_BLOCK_SIZE,
        PAD_ID,
        TOTAL_CP_WORLD_SIZE,
        TOTAL_CP_RANK,
        CP_KV_CACHE_INTERLEAVE_SIZE,
        block_size,
    )


@guarded(
    "vllm.v1.spec_decode.utils:eagle_step_slot_mapping_metadata_kernel",
    why="an operator replaces the kernel",
    feature="speculation",
)
def _eagle_step(
    *,
    positions_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    out_clamped_positions_ptr: torch.Tensor,
    out_slot_mapping_ptr: torch.Tensor,
    block_size: int,
    max_model_len: int,
    PAD_ID: int,
    batch_size: int,
) -> None:
    ops.eagle_step_slot_mapping_metadata(
        positions_ptr[:batch_size],
        block_table_ptr,
        seq_lens_ptr,
        out_clamped_positions_ptr,
        out_slot_mapping_ptr,
        block_size,
        max_model_len,
        PAD_ID,
    )


@guarded(
    "vllm.v1.spec_decode.utils:eagle_prepare_inputs_padded_kernel",
    why="an operator replaces the kernel",
    feature="speculation",
)
def _eagle_prepare_inputs(
    *,
    cu_num_draft_tokens_ptr: torch.Tensor,
    valid_sampled_tokens_count_ptr: torch.Tensor,
    query_start_loc_gpu_ptr: torch.Tensor,
    token_indices_to_sample_ptr: torch.Tensor,
    num_rejected_tokens_gpu_ptr: torch.Tensor,
    num_reqs: int,
) -> None:
    ops.eagle_prepare_inputs_padded(
        cu_num_draft_tokens_ptr[:num_reqs],
        valid_sampled_tokens_count_ptr[:num_reqs],
        query_start_loc_gpu_ptr,
        token_indices_to_sample_ptr[:num_reqs],
        num_rejected_tokens_gpu_ptr[:num_reqs],
    )


@guarded(
    "vllm.v1.spec_decode.utils:eagle_prepare_next_token_padded_kernel",
    why="an operator replaces the kernel",
    feature="speculation",
)
def _eagle_prepare_next_token(
    *,
    sampled_token_ids_ptr: torch.Tensor,
    discard_request_mask_ptr: torch.Tensor,
    backup_next_token_ids_ptr: torch.Tensor,
    next_token_ids_ptr: torch.Tensor,
    valid_sampled_tokens_count_ptr: torch.Tensor,
    vocab_size: int,
    num_sampled_tokens_per_req: int,
    num_reqs: int,
) -> None:
    ops.eagle_prepare_next_token_padded(
        sampled_token_ids_ptr[:num_reqs, :num_sampled_tokens_per_req],
        discard_request_mask_ptr,
        backup_next_token_ids_ptr,
        next_token_ids_ptr[:num_reqs],
        valid_sampled_tokens_count_ptr[:num_reqs],
        vocab_size,
    )


@guarded(
    "vllm.v1.spec_decode.utils:copy_and_expand_eagle_inputs_kernel",
    why="an operator replaces the kernel",
    feature="speculation",
)
def _copy_and_expand_eagle_inputs(
    *,
    target_token_ids_ptr: torch.Tensor,
    target_positions_ptr: torch.Tensor,
    next_token_ids_ptr: torch.Tensor,
    out_input_ids_ptr: torch.Tensor,
    out_positions_ptr: torch.Tensor,
    out_is_rejected_token_mask_ptr: torch.Tensor,
    out_is_masked_token_mask_ptr: torch.Tensor,
    out_new_token_indices_ptr: torch.Tensor,
    out_hidden_state_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    query_end_loc_ptr: torch.Tensor,
    padding_token_id: int,
    parallel_drafting_token_id: int,
    total_input_tokens: int,
    num_padding_slots_per_request: int,
    shift_input_ids: bool,
) -> None:
    ops.copy_and_expand_eagle_inputs(
        target_token_ids_ptr[:total_input_tokens],
        target_positions_ptr[:total_input_tokens],
        next_token_ids_ptr,
        out_input_ids_ptr,
        out_positions_ptr,
        out_is_rejected_token_mask_ptr,
        out_is_masked_token_mask_ptr,
        out_new_token_indices_ptr,
        out_hidden_state_mapping_ptr,
        query_start_loc_ptr,
        query_end_loc_ptr,
        padding_token_id,
        parallel_drafting_token_id,
        num_padding_slots_per_request,
        shift_input_ids,
    )


@guarded(
    "vllm.v1.spec_decode.utils:copy_and_expand_dflash_inputs_kernel",
    why="an operator replaces the kernel",
    feature="speculation",
)
def _copy_and_expand_dflash_inputs(
    *,
    next_token_ids_ptr: torch.Tensor,
    target_positions_ptr: torch.Tensor,
    out_input_ids_ptr: torch.Tensor,
    out_context_positions_ptr: torch.Tensor,
    out_query_positions_ptr: torch.Tensor,
    out_context_slot_mapping_ptr: torch.Tensor,
    out_query_slot_mapping_ptr: torch.Tensor,
    out_token_indices_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    num_rejected_tokens_ptr: torch.Tensor | int,
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_tokens: int,
    total_input_tokens: int,
    HAS_NUM_REJECTED: bool = False,
) -> None:
    if num_query_per_req != num_speculative_tokens + 1:
        raise BindingError(
            f"kernel copy_and_expand_dflash_inputs_kernel received {num_query_per_req} queries per request for "
            f"{num_speculative_tokens} draft tokens; expected one query more than draft tokens. {INSTALL_SUPPORTED}"
        )
    ops.copy_and_expand_dflash_inputs(
        next_token_ids_ptr,
        target_positions_ptr[:total_input_tokens],
        out_input_ids_ptr,
        out_context_positions_ptr,
        out_query_positions_ptr,
        out_context_slot_mapping_ptr,
        out_query_slot_mapping_ptr,
        out_token_indices_ptr,
        block_table_ptr,
        query_start_loc_ptr,
        num_rejected_tokens_ptr if HAS_NUM_REJECTED else None,
        parallel_drafting_token_id,
        block_size,
        num_query_per_req,
    )


@guarded(
    "vllm.v1.sample.rejection_sampler:rejection_greedy_sample_kernel",
    why="an operator replaces the kernel",
    feature="speculation",
)
def _rejection_greedy_sample(
    *,
    output_token_ids_ptr: torch.Tensor,
    cu_num_draft_tokens_ptr: torch.Tensor,
    draft_token_ids_ptr: torch.Tensor,
    target_argmax_ptr: torch.Tensor,
    bonus_token_ids_ptr: torch.Tensor,
    is_greedy_ptr: torch.Tensor | None,
    uniform_probs_ptr: torch.Tensor | None,
    synthetic_conditional_rates_ptr: torch.Tensor | None,
    SYNTHETIC_MODE: bool,
) -> None:
    ops.rejection_greedy_sample(
        output_token_ids_ptr,
        cu_num_draft_tokens_ptr,
        draft_token_ids_ptr,
        target_argmax_ptr,
        bonus_token_ids_ptr,
        is_greedy_ptr,
        uniform_probs_ptr,
        synthetic_conditional_rates_ptr if SYNTHETIC_MODE else None,
    )


@guarded(
    "vllm.v1.sample.rejection_sampler:rejection_random_sample_kernel",
    why="an operator replaces the kernel",
    feature="speculation",
)
def _rejection_random_sample(
    *,
    output_token_ids_ptr: torch.Tensor,
    cu_num_draft_tokens_ptr: torch.Tensor,
    draft_token_ids_ptr: torch.Tensor,
    draft_probs_ptr: torch.Tensor | None,
    target_probs_ptr: torch.Tensor,
    bonus_token_ids_ptr: torch.Tensor,
    recovered_token_ids_ptr: torch.Tensor,
    uniform_probs_ptr: torch.Tensor,
    is_greedy_ptr: torch.Tensor,
    synthetic_conditional_rates_ptr: torch.Tensor | None,
    NO_DRAFT_PROBS: bool,
    SYNTHETIC_MODE: bool,
) -> None:
    ops.rejection_random_sample(
        output_token_ids_ptr,
        cu_num_draft_tokens_ptr,
        draft_token_ids_ptr,
        None if NO_DRAFT_PROBS else draft_probs_ptr,
        target_probs_ptr,
        bonus_token_ids_ptr,
        recovered_token_ids_ptr,
        uniform_probs_ptr,
        is_greedy_ptr,
        synthetic_conditional_rates_ptr if SYNTHETIC_MODE else None,
    )


@guarded(
    "vllm.v1.sample.rejection_sampler:expand_kernel",
    why="an operator replaces the kernel",
    feature="speculation",
)
def _expand(
    *,
    output_ptr: torch.Tensor,
    input_ptr: torch.Tensor,
    cu_num_tokens_ptr: torch.Tensor,
    replace_from: float,
    replace_to: float,
) -> None:
    ops.expand_to_tokens(output_ptr, input_ptr, cu_num_tokens_ptr, replace_from, replace_to)


@guarded(
    "vllm.v1.sample.rejection_sampler:sample_recovered_tokens_kernel",
    why="an operator replaces the kernel",
    feature="speculation",
)
def _sample_recovered_tokens(
    *,
    output_token_ids_ptr: torch.Tensor,
    cu_num_draft_tokens_ptr: torch.Tensor,
    draft_token_ids_ptr: torch.Tensor,
    draft_probs_ptr: torch.Tensor | None,
    target_probs_ptr: torch.Tensor,
    inv_q_ptr: torch.Tensor,
    NO_DRAFT_PROBS: bool,
) -> None:
    ops.sample_recovered_tokens(
        output_token_ids_ptr,
        cu_num_draft_tokens_ptr,
        draft_token_ids_ptr,
        None if NO_DRAFT_PROBS else draft_probs_ptr,
        target_probs_ptr,
        inv_q_ptr,
    )


@guarded(
    "vllm.v1.worker.mamba_utils:batch_memcpy_kernel",
    why="a copy on the host replaces the kernel",
    feature="prefix caching of recurrent layers",
)
def _batch_memcpy(*, src_ptrs: torch.Tensor, dst_ptrs: torch.Tensor, sizes: torch.Tensor) -> None:
    """Copies sizes[i] bytes from address src_ptrs[i] to dst_ptrs[i], in order; the two ranges may overlap.

    vLLM launches this kernel for prefix caching of recurrent models alone, which Backplane refuses
    (`config/stages.py`), so no server reaches it. It is replaced because vLLM's runner can launch it: a launch copies
    or names the remedy, instead of failing inside Triton.

    The kernel takes lists of addresses instead of tensors, so it cannot be an operator: a schema cannot express which
    tensors are written, and a reference cannot turn an address on an arbitrary device into memory. The addresses must
    be in host tensors, which shows that they are host addresses. A device with its own memory has to replace the
    kernel itself.
    """
    for addresses in (src_ptrs, dst_ptrs, sizes):
        if addresses.device.type != "cpu":
            raise OperatorError(
                f"memory at raw addresses of device {addresses.device.type!r} cannot be copied by the host; "
                "for models with recurrent layers start with --no-enable-prefix-caching, or let the device "
                "register a kernel for vllm.v1.worker.mamba_utils.batch_memcpy_kernel"
            )
    for source, target, size in zip(src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


REPLACEMENTS: Mapping[str, Launch] = {
    "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": _slot_mapping,
    "vllm.v1.spec_decode.utils.eagle_step_slot_mapping_metadata_kernel": _eagle_step,
    "vllm.v1.spec_decode.utils.eagle_prepare_inputs_padded_kernel": _eagle_prepare_inputs,
    "vllm.v1.spec_decode.utils.eagle_prepare_next_token_padded_kernel": _eagle_prepare_next_token,
    "vllm.v1.spec_decode.utils.copy_and_expand_eagle_inputs_kernel": _copy_and_expand_eagle_inputs,
    "vllm.v1.spec_decode.utils.copy_and_expand_dflash_inputs_kernel": _copy_and_expand_dflash_inputs,
    "vllm.v1.sample.rejection_sampler.rejection_greedy_sample_kernel": _rejection_greedy_sample,
    "vllm.v1.sample.rejection_sampler.rejection_random_sample_kernel": _rejection_random_sample,
    "vllm.v1.sample.rejection_sampler.expand_kernel": _expand,
    "vllm.v1.sample.rejection_sampler.sample_recovered_tokens_kernel": _sample_recovered_tokens,
    "vllm.v1.worker.mamba_utils.batch_memcpy_kernel": _batch_memcpy,
}


@cache
def register() -> None:
    """Replaces the runner's kernels by operators. A second call does nothing."""
    compat.register_kernels({name: launcher(name, replacement) for name, replacement in REPLACEMENTS.items()})


@guarded(
    "vllm.triton_utils.dispatcher:KernelOverride",
    "vllm.triton_utils.dispatcher:_rebind_kernels",
    why="launches reach an operator through it, by the names of their arguments",
    versions=">=0.31",
)
def launcher(name: str, replacement: Launch) -> Launch:
    """Returns the function that vLLM calls instead of the kernel `name`: it passes the launch arguments to the
    replacement by name."""
    arguments = argument_names(name)
    parameters = inspect.signature(replacement).parameters
    for parameter in parameters.values():
        if parameter.default is parameter.empty and parameter.name not in arguments:
            raise BindingError(
                f"kernel {name} has no argument {parameter.name!r}{nearest(parameter.name, arguments)} "
                f"It has: {', '.join(arguments)}. {INSTALL_SUPPORTED}"
            )

    def launch(*args: Any, **kwargs: Any) -> None:
        given = dict(zip(arguments, args, strict=False)) | kwargs
        replacement(**{key: given[key] for key in parameters if key in given})

    # The dispatcher passes keywords only to an implementation with the kernel's own parameter names.
    launch.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(argument, inspect.Parameter.POSITIONAL_OR_KEYWORD) for argument in arguments]
    )
    launch.arg_names = arguments  # type: ignore[attr-defined]
    launch.__name__ = name.rpartition(".")[2]
    return launch


def argument_names(name: str) -> tuple[str, ...]:
    """Returns the argument names of the upstream kernel, with or without Triton installed."""
    module_name, *attributes = _split(name)
    try:
        found: Any = importlib.import_module(module_name)
        for attribute in attributes:
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as fault:
        raise BindingError(f"kernel {name} does not exist in this vLLM ({fault}). {INSTALL_SUPPORTED}") from None
    names = getattr(found, "arg_names", None)
    return tuple(inspect.signature(found).parameters) if names is None else tuple(names)


def _split(name: str) -> list[str]:
    """Returns module, class if there is one, and attribute. A capital letter distinguishes a class from a module."""
    *path, attribute = name.split(".")
    if path[-1][:1].isupper():
        return [".".join(path[:-1]), path[-1], attribute]
    return [".".join(path), attribute]
