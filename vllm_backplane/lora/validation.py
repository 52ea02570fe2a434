"""Loads LoRA adapters and validates them against the model; a rejected adapter leaves nothing in the worker.

vLLM copies the tensors of an adapter into slots that are as large as the layers. It does not detect that an adapter was
trained for a smaller model, that it names layers which the model does not have, or that the rank of its tensors differs
from the rank in adapter_config.json. vLLM would serve each of these adapters, with output that the training did not
intend. If a copy fails halfway, vLLM leaves the slot occupied.

All workers agree on the result, and the last rank raises the error (`distributed/all_or_none.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from vllm.config import ParallelConfig
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import get_adapter_absolute_path, parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear
from vllm.model_executor.models.utils import PPMissingLayer

from vllm_backplane.distributed.all_or_none import gather_failure, is_reporting_rank
from vllm_backplane.errors import short_repr
from vllm_backplane.lora.adapter_files import WEIGHTS, UnusableFiles, require_loadable
from vllm_backplane.lora.http_errors import AdapterRefused

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.request import LoRARequest

SHOWN = 3
"""Mismatches of an adapter that the error lists; an adapter of another model has hundreds."""
ENVIRONMENT_ERRORS = (LoRAAdapterNotFoundError, MemoryError, torch.OutOfMemoryError, OSError)
"""Errors while files are read that are no fault of the adapter; vLLM's server answers the first one with 404 itself."""
_PIECE = 1 << 20
"""Values that are examined together."""
PINNED = "items are pinned"
"""Part of vLLM's error text when every slot for an adapter is taken by a pinned one."""
UNPIN = "; unload a pinned adapter, or raise --max-cpu-loras"


@dataclass(frozen=True, slots=True)
class Failure:
    reason: str
    of_adapter: bool
    """The adapter is at fault, and not the worker or its files' storage."""


def add_validated(
    runner: Any, request: LoRARequest, parallel: ParallelConfig, rank: int, load: Callable[[LoRARequest], bool]
) -> bool:
    """Returns the result of vLLM's `load`, or raises an error that names what is wrong with the adapter."""
    if getattr(runner.get_model(), "lora_manager", None) is None:  # vLLM raises that LoRA is not enabled
        return load(request)
    added, failure, raised = load_and_validate(runner, request, parallel, lambda one: load_checked(runner, one, load))
    if failure is None:
        return added
    if not is_reporting_rank(parallel, rank):
        return False
    if failure.of_adapter:
        raise AdapterRefused(request.lora_name, failure.reason) from raised
    if isinstance(raised, ENVIRONMENT_ERRORS):
        raise raised
    raise RuntimeError(failure.reason) from raised


def load_and_validate(
    runner: Any, request: LoRARequest, parallel: ParallelConfig, load: Callable[[LoRARequest], bool]
) -> tuple[bool, Failure | None, Exception | None]:
    """Loads an adapter and validates it. If any worker failed, every worker removes the adapter again.

    Returns the result of `load`, the failure on which all workers agree, and the exception that `load` raised here.
    """
    manager: LoRAModelManager = runner.get_model().lora_manager
    number, added, raised = request.lora_int_id, False, None
    before = manager.get_adapter(number)
    try:
        added = load(request)
    except Exception as fault:
        raised = fault
    try:
        failure = _find_failure(manager, request, parallel, before, raised)
    except Exception as fault:  # gather_failure() is a collective, so every worker must reach it
        failure = Failure(_text(fault), False)
    failure = gather_failure(failure)
    # An adapter that already had this number, and that vLLM did not replace, stays loaded.
    if failure is not None and manager.get_adapter(number) is not before:
        runner.remove_lora(number)
    return added, failure, raised


def load_checked(runner: Any, request: LoRARequest, load: Callable[[LoRARequest], bool]) -> bool:
    """Checks the files of an adapter if vLLM is going to read them, and returns the result of vLLM's `load`."""
    manager: LoRAModelManager = runner.get_model().lora_manager
    if manager.get_adapter(request.lora_int_id) is None or request.load_inplace:
        folder = _folder_of(request)
        require_loadable(folder, manager.lora_config.max_lora_rank)
        refuse_repeated_values(folder)
    return load(request)


def _folder_of(request: LoRARequest) -> str:
    """Returns the folder that vLLM reads the adapter from, which it may have to download."""
    try:
        return get_adapter_absolute_path(request.lora_path)
    except FileNotFoundError as fault:  # as where vLLM calls it
        raise LoRAAdapterNotFoundError(request.lora_name, request.lora_path) from fault


def refuse_repeated_values(folder: str) -> None:
    """Raises `UnusableFiles` if the tensors in a pickled file are larger than the file: they may repeat their values,
    and vLLM and this check of their values would expand them. Other files store every value."""
    present = [name for name in WEIGHTS if Path(folder, name).is_file()]
    if not present or present[0].endswith(".safetensors"):  # vLLM reads the first one
        return
    file = Path(folder, present[0])
    # Shapes and dtypes, without the data. Files of old releases of PyTorch, which are no archives, cannot be mapped.
    tensors = torch.load(file, map_location="meta", weights_only=True, mmap=is_zipfile(file))
    expanded = sum(tensor.nbytes for tensor in _tensors(tensors))
    if expanded > file.stat().st_size:
        raise UnusableFiles(
            f"the tensors in {file.name} have {expanded} bytes, more than the file, so their values repeat; save them "
            f"as {WEIGHTS[0]}"
        )


def _tensors(loaded: Any) -> Iterable[torch.Tensor]:
    """Returns the tensors of what `torch.load` returned. vLLM reports what is no dictionary of tensors."""
    return (value for value in loaded.values() if isinstance(value, torch.Tensor)) if isinstance(loaded, dict) else ()


def _find_failure(
    manager: LoRAModelManager,
    request: LoRARequest,
    parallel: ParallelConfig,
    before: LoRAModel | None,
    raised: Exception | None,
) -> Failure | None:
    adapter = manager.get_adapter(request.lora_int_id)
    if raised is not None and adapter is before:  # its files could not be read, or no slot was free
        if PINNED in str(raised):
            # prefetch.py raises the same reason again for a second, so the text may already end with the remedy.
            return Failure(_text(raised).removesuffix(UNPIN) + UNPIN, False)
        missing = _missing_factor(request) if isinstance(raised, TypeError) else None
        return Failure(missing or _text(raised), not isinstance(raised, ENVIRONMENT_ERRORS))
    if adapter is None or adapter is before:
        faults = []
    else:
        faults = [*mismatches(manager, adapter, _ranks(request), parallel), *rank_mismatches(request.lora_path)]
    if faults:
        more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        return Failure("; ".join(faults[:SHOWN]) + more, True)
    return None if raised is None else Failure(_text(raised), False)


def _missing_factor(request: LoRARequest) -> str | None:
    """Returns which of a layer's two factors, lora_A or lora_B, is not in the file. vLLM's TypeError does not name
    it."""
    file = Path(get_adapter_absolute_path(request.lora_path)) / "adapter_model.safetensors"
    if not file.is_file():
        return None
    with safe_open(file, "pt") as opened:
        names = set(opened.keys())
    for name in sorted(names):
        one, other = ("lora_A", "lora_B") if "lora_A" in name else ("lora_B", "lora_A")
        if one in name and name.replace(one, other) not in names:
            return f"{short_repr(name.replace(one, other))} is missing"
    return None


def _text(raised: Exception) -> str:
    return str(raised) or type(raised).__name__


def _ranks(request: LoRARequest) -> tuple[int, ...]:
    """Returns the ranks in adapter_config.json: that of the adapter, and those that some layers have of their own."""
    described = PEFTHelper.from_local_dir(get_adapter_absolute_path(request.lora_path), None)
    return (described.r, *(getattr(described, "rank_pattern", None) or {}).values())  # patterns: since vLLM 0.32


def rank_mismatches(path: str) -> Iterator[str]:
    """Yields a text for each layer whose tensors do not have the rank that a pattern in adapter_config.json gives it.
    vLLM would scale that layer by the rank of the description. Without patterns, shapes are compared with one rank."""
    folder = get_adapter_absolute_path(path)
    described = PEFTHelper.from_local_dir(folder, None)
    if not getattr(described, "rank_pattern", None):  # since vLLM 0.32
        return
    with safe_open(Path(folder) / "adapter_model.safetensors", "pt") as opened:  # require_loadable() requires the file
        for name in sorted(opened.keys()):
            module, is_a = parse_fine_tuned_lora_name(name)
            rank, _ = described.get_rank_and_scaling(module)
            found, *_ = opened.get_slice(name).get_shape() or [0]
            if is_a and found != rank:
                yield (
                    f"{short_repr(module)}: lora_A has the rank {found}, but rank_pattern in adapter_config.json "
                    f"requires {rank}"
                )


def mismatches(
    manager: LoRAModelManager, adapter: LoRAModel, ranks: Sequence[int], parallel: ParallelConfig
) -> Iterator[str]:
    """Yields a text for each layer of a loaded adapter that the model lacks, whose shapes do not fit the model, or
    whose values are not finite. `ranks` are those of the description, the adapter's own first."""
    has_target_modules = bool(manager.lora_config.target_modules)
    for name, weights in adapter.loras.items():
        layer = manager.modules.get(name)
        if layer is None and getattr(manager, "is_pooling_model", False):  # their checkpoints may omit the prefix
            layer = manager.modules.get(f"model.{name}")
        if layer is not None:
            faults = [*_shape_mismatches(name, weights, getattr(layer, "base_layer", None), ranks)]
            yield from faults or _values_that_are_not_finite(name, weights)
        elif "experts" in name.split("."):  # experts have no LoRA layers (`config/refusals.py`)
            yield f"{short_repr(name)}: experts take no adapter"
        elif not _may_lack_lora_layer(manager, name, has_target_modules, parallel):
            yield f"the model has no layer {short_repr(name)} that takes an adapter"


def _values_that_are_not_finite(name: str, weights: LoRALayerWeights) -> Iterator[str]:
    """Yields a text for each factor of a layer with NaN or infinite values."""
    for letter, factors in (("A", weights.lora_a), ("B", weights.lora_b)):
        for factor in factors if isinstance(factors, list) else [factors]:
            if factor is not None and not _is_finite(factor):
                yield f"{short_repr(name)}: lora_{letter} has NaN or infinite values"


def _is_finite(factor: torch.Tensor) -> bool:
    """Returns whether all values are finite. The memory for that does not depend on the size of the tensor."""
    rows = max(1, _PIECE // max(1, math.prod(factor.shape[1:])))
    pieces = factor.split(rows) if factor.ndim else (factor,)
    return all(bool(torch.isfinite(piece).all()) for piece in pieces)


def _may_lack_lora_layer(
    manager: LoRAModelManager, name: str, has_target_modules: bool, parallel: ParallelConfig
) -> bool:
    """Returns whether the name belongs to the model although this worker has no LoRA layer for it:
    --lora-target-modules leaves the layer out, or it is on another pipeline stage, which validates it."""
    if not has_target_modules and parallel.pipeline_parallel_size == 1:
        return False
    names = [name, f"model.{name}"] if getattr(manager, "is_pooling_model", False) else [name]
    found = {_location(manager.model, one) for one in names}
    return "another stage" in found or (has_target_modules and "this stage" in found)


def _location(model: torch.nn.Module, name: str) -> str:
    """Returns where the parent module of a layer is: "this stage", "another stage" or "nowhere". The layer itself need
    not exist, because the model may have fused it with others (Q, K and V)."""
    *parents, last = name.split(".")
    module = model
    for part in parents:
        inner = module._modules.get(part)
        if inner is None:
            return "nowhere"
        if isinstance(inner, PPMissingLayer):
            return "another stage"
        module = inner
    return "another stage" if isinstance(module._modules.get(last), PPMissingLayer) else "this stage"


def _shape_mismatches(name: str, weights: LoRALayerWeights, base: Any, ranks: Sequence[int]) -> Iterator[str]:
    """Yields a text for each shape that does not fit a linear layer. Sizes are unsharded, also under tensor
    parallelism. vLLM checks embeddings and logits itself."""
    if not isinstance(base, LinearBase):
        return
    outputs = _output_sizes(base)
    if isinstance(weights.lora_a, list):
        parts = list(zip(weights.lora_a, weights.lora_b, strict=True))
    else:
        parts, outputs = [(weights.lora_a, weights.lora_b)], [sum(outputs)]
    if len(parts) != len(outputs):  # the model splits the layer in another way
        return
    for place, ((a, b), width) in enumerate(zip(parts, outputs, strict=True)):
        if a is None and b is None:
            continue
        part = short_repr(name) if len(parts) == 1 else f"{short_repr(name)}, part {place + 1}"
        if a is None or b is None:
            yield f"{part}: lora_{'A' if a is None else 'B'} is missing"
            continue
        rank = a.shape[0] if a.ndim and a.shape[0] in ranks else ranks[0]
        expected = ((rank, base.input_size), (width, rank))
        if (tuple(a.shape), tuple(b.shape)) != expected:
            yield (
                f"{part}: lora_A is {tuple(a.shape)} and lora_B {tuple(b.shape)}, but the model and "
                f"adapter_config.json require {expected[0]} and {expected[1]}"
            )


def _output_sizes(base: LinearBase) -> list[int]:
    """Returns the output size of each matrix product that is fused in the layer."""
    if isinstance(base, QKVParallelLinear):
        keys, values = base.head_size, getattr(base, "v_head_size", base.head_size)
        return [base.total_num_heads * keys, base.total_num_kv_heads * keys, base.total_num_kv_heads * values]
    return list(getattr(base, "output_sizes", [base.output_size]))
