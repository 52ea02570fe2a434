"""LoRA adapters are held against the model when they are loaded; one that does not fit leaves nothing behind.

vLLM copies what an adapter has into slots that are as large as the layers. It does not see that an adapter was made for
a smaller model, that it names layers which the model does not have, or that the file's rank is another than the
description's: each would be served, and give other answers than it was trained for. Where a copy fails halfway, the
slot stays taken.

Workers agree on the outcome, and the last one tells it (`agreement.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from vllm.config import ParallelConfig
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import get_adapter_absolute_path
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear
from vllm.model_executor.models.utils import PPMissingLayer

from vllm_backplane.distributed.all_or_none import agree, tells
from vllm_backplane.lora.http_errors import AdapterRefused

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.request import LoRARequest

SHOWN = 3
"""Faults of an adapter that the refusal names; one made for another model has hundreds."""
OURS = (LoRAAdapterNotFoundError, MemoryError, torch.OutOfMemoryError, OSError)
"""Raised while files are read, and no fault in them; vLLM has an answer of its own to the first."""
PINNED = "items are pinned"
"""What vLLM says where there is no place for another adapter."""
UNPIN = "; unload a pinned adapter, or raise --max-cpu-loras"


@dataclass(frozen=True, slots=True)
class Failure:
    reason: str
    of_adapter: bool


def add(
    runner: Any, request: LoRARequest, parallel: ParallelConfig, rank: int, load: Callable[[LoRARequest], bool]
) -> bool:
    """vLLM's `load`, or an error that says what is wrong with the adapter."""
    if getattr(runner.get_model(), "lora_manager", None) is None:  # vLLM says that LoRA is not enabled
        return load(request)
    added, failure, raised = attempt(runner, request, parallel, load)
    if failure is None:
        return added
    if not tells(parallel, rank):
        return False
    if failure.of_adapter:
        raise AdapterRefused(request.lora_name, failure.reason) from raised
    if isinstance(raised, OURS):
        raise raised
    raise RuntimeError(failure.reason) from raised


def attempt(
    runner: Any, request: LoRARequest, parallel: ParallelConfig, load: Callable[[LoRARequest], bool]
) -> tuple[bool, Failure | None, Exception | None]:
    """What `load` said; what is wrong, in which all workers agree and of which nothing is left; what it raised here."""
    manager: LoRAModelManager = runner.get_model().lora_manager
    number, added, raised = request.lora_int_id, False, None
    before = manager.get_adapter(number)
    try:
        added = load(request)
    except Exception as fault:
        raised = fault
    try:
        failure = _judge(manager, request, parallel, before, raised)
    except Exception as fault:  # every worker must come to the agreement
        failure = Failure(_told(fault), False)
    failure = agree(failure)
    # One that was there before under the number, and was to be replaced, is as good as it was.
    if failure is not None and manager.get_adapter(number) is not before:
        runner.remove_lora(number)
    return added, failure, raised


def _judge(
    manager: LoRAModelManager,
    request: LoRARequest,
    parallel: ParallelConfig,
    before: LoRAModel | None,
    raised: Exception | None,
) -> Failure | None:
    adapter = manager.get_adapter(request.lora_int_id)
    if raised is not None and adapter is before:  # its files could not be read, or there was no place for it
        if PINNED in str(raised):
            return Failure(_told(raised).removesuffix(UNPIN) + UNPIN, False)  # may be told once more, within the second
        missing = _missing_factor(request) if isinstance(raised, TypeError) else None
        return Failure(missing or _told(raised), not isinstance(raised, OURS))
    faults = [] if adapter is None or adapter is before else list(misfits(manager, adapter, _rank(request), parallel))
    if faults:
        more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        return Failure("; ".join(faults[:SHOWN]) + more, True)
    return None if raised is None else Failure(_told(raised), False)


def _missing_factor(request: LoRARequest) -> str | None:
    """Half of a product that the file does not have; vLLM stumbles over it without a word about it."""
    file = Path(get_adapter_absolute_path(request.lora_path)) / "adapter_model.safetensors"
    if not file.is_file():
        return None
    with safe_open(file, "pt") as opened:
        names = set(opened.keys())
    for name in sorted(names):
        one, other = ("lora_A", "lora_B") if "lora_A" in name else ("lora_B", "lora_A")
        if one in name and name.replace(one, other) not in names:
            return f"{name.replace(one, other)} is missing"
    return None


def _told(raised: Exception) -> str:
    return str(raised) or type(raised).__name__


def _rank(request: LoRARequest) -> int | None:
    """That the description states for all layers; None where layers have their own."""
    described = PEFTHelper.from_local_dir(get_adapter_absolute_path(request.lora_path), None)
    return None if getattr(described, "rank_pattern", None) else described.r  # patterns: since vLLM 0.32


def misfits(manager: LoRAModelManager, adapter: LoRAModel, rank: int | None, parallel: ParallelConfig) -> Iterator[str]:
    """What of a loaded adapter the model has no place for."""
    chosen = bool(manager.lora_config.target_modules)
    for name, weights in adapter.loras.items():
        layer = manager.modules.get(name)
        if layer is None and getattr(manager, "is_pooling_model", False):  # whose checkpoints may leave that out
            layer = manager.modules.get(f"model.{name}")
        if layer is not None:
            yield from _of_layer(name, weights, getattr(layer, "base_layer", None), rank)
        elif "experts" in name.split("."):  # nowhere are there places for these (`configuration.py`)
            yield f"{name!r}: experts take no adapter"
        elif not _may_be_without_place(manager, name, chosen, parallel):
            yield f"the model has no layer {name!r} that takes an adapter"


def _may_be_without_place(manager: LoRAModelManager, name: str, chosen: bool, parallel: ParallelConfig) -> bool:
    """Whether it belongs to a module of the model all the same: one of which the user has `chosen` other layers, or one
    of another stage of the pipeline, which judges it."""
    if not chosen and parallel.pipeline_parallel_size == 1:
        return False
    names = [name, f"model.{name}"] if getattr(manager, "is_pooling_model", False) else [name]
    found = {_whose(manager.model, one) for one in names}
    return "another stage's" in found or (chosen and "ours" in found)


def _whose(model: torch.nn.Module, name: str) -> str:
    """Of the module around a layer, or of the layer itself; layers may be parts of one that the model has (Q, K and V),
    so they are not looked for."""
    *around, last = name.split(".")
    module = model
    for part in around:
        inner = module._modules.get(part)
        if inner is None:
            return "nobody's"
        if isinstance(inner, PPMissingLayer):
            return "another stage's"
        module = inner
    return "another stage's" if isinstance(module._modules.get(last), PPMissingLayer) else "ours"


def _of_layer(name: str, weights: LoRALayerWeights, base: Any, rank: int | None) -> Iterator[str]:
    """Linear layers, of full size also where workers divide them; vLLM looks at vocabularies itself."""
    if not isinstance(base, LinearBase):
        return
    outputs = _outputs(base)
    if isinstance(weights.lora_a, list):
        parts = list(zip(weights.lora_a, weights.lora_b, strict=True))
    else:
        parts, outputs = [(weights.lora_a, weights.lora_b)], [sum(outputs)]
    if len(parts) != len(outputs):  # of a model that cuts the layer otherwise
        return
    for place, ((a, b), width) in enumerate(zip(parts, outputs, strict=True)):
        if a is None and b is None:
            continue
        part = name if len(parts) == 1 else f"{name}, part {place + 1}"
        if a is None or b is None:
            yield f"{part}: lora_{'A' if a is None else 'B'} is missing"
            continue
        expected = (
            (a.shape[0] if rank is None else rank, base.input_size),
            (width, a.shape[0] if rank is None else rank),
        )
        if (tuple(a.shape), tuple(b.shape)) != expected:
            yield (
                f"{part}: lora_A is {tuple(a.shape)} and lora_B {tuple(b.shape)}, where the model and "
                f"adapter_config.json want {expected[0]} and {expected[1]}"
            )


def _outputs(base: LinearBase) -> list[int]:
    """Of each of the products that the layer computes in one."""
    if isinstance(base, QKVParallelLinear):
        keys, values = base.head_size, getattr(base, "v_head_size", base.head_size)
        return [base.total_num_heads * keys, base.total_num_kv_heads * keys, base.total_num_kv_heads * values]
    return list(getattr(base, "output_sizes", [base.output_size]))
