"""Where the supported versions of vLLM (0.30 to 0.32) differ, asked by capability rather than by number.

Everything else is written once, for all of them. `PARTLY_THERE` lists what we override or use of vLLM that not every
supported version has; a test compares it with the source of each.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

Launch = Callable[..., None]

_PUNICA = "vllm.lora.punica_wrapper.punica_base"

PARTLY_THERE: Mapping[str, str] = {
    "vllm.platforms.interface:Platform.register_triton_kernel_overrides": (
        "where vLLM does not ask the platform for its kernels, ask_for_kernel_overrides does"
    ),
    "vllm.platforms.interface:Platform.get_mla_prefill_backend_cls": (
        "where vLLM does not ask the platform, it finds nothing for prompts and refuses models with a latent (MLA)"
    ),
    "vllm.v1.worker.gpu_worker:Worker._make_model_runner": "where vLLM does not call it, build_runner does",
    "vllm.v1.worker.gpu_worker:Worker.discard": "called where vLLM can give up the KV cache alone",
    f"{_PUNICA}:PunicaWrapperABC.apply_lora_full_linear": "vLLM calls it where it has adapters that replace a layer",
    f"{_PUNICA}:PunicaWrapperBase._select_full_linear_output": "used by apply_lora_full_linear alone",
}
"""module:Class.name of vLLM, and what happens in a version without it."""


def release() -> str:
    """What vLLM calls itself, for servers that compare themselves with each other."""
    from vllm import __version__

    return __version__


def has_known_decode_inputs() -> bool:
    """Whether the runner's buffers are those that runner/decode_inputs.py fills."""
    return release().startswith("0.32.")


def ask_for_kernel_overrides(platform: Any) -> None:
    """Have the platform replace the runner's Triton kernels. vLLM 0.31 asks by itself, in every process."""
    from vllm.platforms.interface import Platform

    if not hasattr(Platform, "register_triton_kernel_overrides"):
        platform.register_triton_kernel_overrides()


def hash_routing(moe: Any) -> bool:
    """Whether experts are chosen by a table of token ids. vLLM 0.30 does not say; there, the one model that does it
    (DeepSeek-V4) is refused for its attention."""
    return bool(getattr(moe, "has_hash_routing", False))


def expert_parts(experts: Any) -> tuple[str, ...]:
    """What the checkpoint calls the weights of an expert. Before vLLM 0.32 compressed-tensors knew one naming."""
    parts = ("gate_proj", "up_proj", "down_proj")
    return tuple(getattr(experts, f"ckpt_{part}_name", part) for part in parts)


def configure_logging(args: Any) -> None:
    """Apply the logging options of a command line. Since vLLM 0.31 they are options; before, variables alone."""
    import vllm.logger

    configure = getattr(vllm.logger, "configure_logging_from_args", None)
    if configure is not None:
        configure(args)


def build_runner(worker: Any) -> None:
    """Give a worker its workspace and its model runner. vLLM 0.32 has a method for it; before, it was inlined."""
    if hasattr(type(worker), "_init_workspace_and_model_runner"):
        worker._init_workspace_and_model_runner()
        return
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(worker.device, 1)
    worker.model_runner = worker._make_model_runner()


def seed_replica(seed: int, replica: int) -> None:
    """Seed the random state of a data-parallel replica. Before vLLM 0.32 all replicas had the same one."""
    from vllm.utils.torch_utils import set_random_seed

    if len(inspect.signature(set_random_seed).parameters) > 1:
        set_random_seed(seed, replica)
    else:
        set_random_seed(seed)


def register_kernels(replacements: Mapping[str, Launch]) -> None:
    """Put functions in the place of Triton kernels. vLLM 0.31 has a dispatcher for it; before, modules held them."""
    if find_spec("vllm.triton_utils.dispatcher") is not None:
        from vllm.triton_utils.dispatcher import register_kernels as upstream

        upstream(replacements)
        return
    for name, launch in replacements.items():
        _replace_kernel(name, launch)


class _Launcher:
    """Is launched like a Triton kernel, with a grid that a function has no use for."""

    def __init__(self, launch: Launch, arg_names: tuple[str, ...]) -> None:
        self._launch = launch
        self.arg_names = arg_names
        self.func = launch

    def __getitem__(self, _grid: Any) -> Launch:
        return self._launch


def _replace_kernel(name: str, launch: Launch) -> None:
    owner_name, _, attribute = name.rpartition(".")
    module_name, _, last = owner_name.rpartition(".")
    owner: Any = (
        getattr(importlib.import_module(module_name), last)
        if last[:1].isupper()
        else importlib.import_module(owner_name)
    )
    original = vars(owner)[attribute]
    kernel = original.__func__ if isinstance(original, staticmethod) else original
    replacement = _Launcher(launch, tuple(getattr(launch, "arg_names", ())))
    for module in list(sys.modules.values()):
        if not getattr(module, "__name__", "").startswith("vllm."):
            continue
        for held, value in list(vars(module).items()):
            if value is kernel:
                setattr(module, held, replacement)
            elif type(value).__module__.startswith("vllm.") and _holds(value, kernel):
                # An object that launches the kernel it was given, and remembers its argument names.
                value.kernel = replacement
                vars(value).pop("_kernel_arg_names", None)
    setattr(owner, attribute, replacement)


def _holds(value: Any, kernel: Any) -> bool:
    return hasattr(value, "__dict__") and vars(value).get("kernel") is kernel
