"""Hides the differences between the supported releases of vLLM (0.30 to 0.33).

The functions test whether vLLM has a module, a name or a parameter, and compare no versions. Other code is written
once, for all releases; at most it reads a single attribute with a default. `NOT_IN_EVERY_RELEASE` lists the names of
vLLM that Backplane overrides or uses and that some supported release lacks; a test compares the list with the source of
each release.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from vllm_backplane.guards import guarded

Launch = Callable[..., None]

_PUNICA = "vllm.lora.punica_wrapper.punica_base"

NOT_IN_EVERY_RELEASE: Mapping[str, str] = {
    "vllm.platforms.interface:Platform.register_triton_kernel_overrides": (
        "vLLM does not call it; register_kernel_overrides does"
    ),
    "vllm.platforms.interface:Platform.get_mla_prefill_backend_cls": (
        "vLLM does not call it, finds no prefill backend and refuses models with MLA"
    ),
    "vllm.v1.worker.gpu_worker:Worker._make_model_runner": "vLLM does not call it; build_runner does",
    "vllm.v1.worker.gpu_worker:Worker.discard": "vLLM cannot discard the KV cache alone and does not call it",
    "vllm.v1.worker.gpu_worker:Worker.reset_weights": "vLLM cannot set weights to zero and does not call it",
    "vllm.v1.outputs:AsyncModelRunnerOutput.get_kv_connector_output": "vLLM does not call it",
    f"{_PUNICA}:PunicaWrapperABC.apply_lora_full_linear": (
        "vLLM has no adapters that replace a whole layer and does not call it"
    ),
    f"{_PUNICA}:PunicaWrapperBase._select_full_linear_output": "only apply_lora_full_linear uses it",
}
"""Maps module:Class.name of vLLM to what happens in a release without it."""


def vllm_version() -> str:
    """Returns the version of vLLM, which peers compare before they exchange data."""
    from vllm import __version__

    return __version__


def register_kernel_overrides(platform: Any) -> None:
    """Lets the platform replace the runner's Triton kernels. Since 0.31 vLLM does this itself, in every process."""
    from vllm.platforms.interface import Platform

    if not hasattr(Platform, "register_triton_kernel_overrides"):
        platform.register_triton_kernel_overrides()


def has_hash_routing(moe: Any) -> bool:
    """Returns whether experts are chosen by a table of token ids.

    vLLM 0.30 does not report it. There, the only model that does so (DeepSeek-V4) is refused because of its attention.
    """
    return bool(getattr(moe, "has_hash_routing", False))


def expert_weight_names(experts: Any) -> tuple[str, ...]:
    """Returns the checkpoint's names of an expert's gate, up and down projections.

    Before vLLM 0.32, compressed-tensors supported only the default names.
    """
    parts = ("gate_proj", "up_proj", "down_proj")
    return tuple(getattr(experts, f"ckpt_{part}_name", part) for part in parts)


def set_up_environment() -> None:
    """Sets the environment variables that vLLM's command sets before it parses its arguments."""
    try:
        from vllm.entrypoints.common.startup import cli_env_setup  # since vLLM 0.33
    except ImportError:
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    cli_env_setup()


def chat_template_of(args: Any) -> tuple[str | None, dict[str, Any]]:
    """Returns the chat template of a server's command line, and the variables for all chat templates."""
    try:
        from vllm.entrypoints.common.cli_args import resolve_default_chat_template_kwargs  # since vLLM 0.33
    except ImportError:
        from vllm.entrypoints.launchers.cli_args import resolve_default_chat_template_kwargs
    try:
        from vllm.renderers.chat_utils import load_chat_template  # since vLLM 0.32
    except ImportError:
        from vllm.entrypoints.chat_utils import load_chat_template
    return load_chat_template(args.chat_template), resolve_default_chat_template_kwargs(args)


def configure_logging(args: Any) -> None:
    """Applies the logging options of a command line. Before vLLM 0.31 there were only environment variables."""
    import vllm.logger

    configure = getattr(vllm.logger, "configure_logging_from_args", None)
    if configure is not None:
        configure(args)


@guarded(
    "vllm.platforms.interface:Platform.validate_environ",
    why="a variable of Backplane is added to the table that it reads",
)
@guarded(
    "vllm.envs:validate_environ",
    why="a variable of Backplane is added to the table that it reads",
    versions="<0.31",
)
def declare_variables() -> None:
    """Adds Backplane's VLLM_* variable to vLLM's table; vLLM warns of variables outside of it, or rejects them."""
    from vllm import envs

    from vllm_patchbay.upstream.versions import VERSION_VARIABLE

    envs.environment_variables[VERSION_VARIABLE] = lambda: os.environ.get(VERSION_VARIABLE)


@guarded(
    "vllm.v1.worker.gpu_worker:Worker._init_workspace_and_model_runner",
    why="it creates the workspace and the runner",
    versions=">=0.32",
)
def build_runner(worker: Any) -> None:
    """Creates a worker's workspace and model runner. vLLM has a method for it since 0.32; before, it was inlined."""
    if hasattr(type(worker), "_init_workspace_and_model_runner"):
        worker._init_workspace_and_model_runner()
        return
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(worker.device, 1)
    worker.model_runner = worker._make_model_runner()


def unregister_kv_caches() -> None:
    """Makes a KV connector drop its registration of the KV cache, which is about to be released: since vLLM 0.33."""
    _call_connector("unregister_kv_caches")


def restore_kv_caches() -> None:
    """Makes a KV connector register the KV cache again: since vLLM 0.33."""
    _call_connector("restore_kv_caches")


def _call_connector(method: str) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        getattr(get_kv_transfer_group(), method, lambda: None)()


def seed_replica(seed: int, replica: int) -> None:
    """Seeds the random state of a data-parallel replica. Before vLLM 0.32 all replicas had the same state."""
    from vllm.utils.torch_utils import set_random_seed

    if len(inspect.signature(set_random_seed).parameters) > 1:
        set_random_seed(seed, replica)
    else:
        set_random_seed(seed)


def register_kernels(replacements: Mapping[str, Launch]) -> None:
    """Replaces Triton kernels by Python functions.

    vLLM has a dispatcher for it since 0.31. Before, modules refer to the kernels directly, so each reference is
    replaced.
    """
    if find_spec("vllm.triton_utils.dispatcher") is not None:
        from vllm.triton_utils.dispatcher import register_kernels as upstream

        upstream(replacements)
        return
    for name, launch in replacements.items():
        _replace_kernel(name, launch)


class _Launcher:
    """Calls a Python function with the launch syntax of a Triton kernel, ``kernel[grid](...)``; the grid is ignored."""

    def __init__(self, launch: Launch, arg_names: tuple[str, ...]) -> None:
        self._launch = launch
        self.arg_names = arg_names
        self.func = launch

    def __getitem__(self, _grid: Any) -> Launch:
        return self._launch


@guarded(
    "vllm.model_executor.warmup.jit_warmup_triton_helper:VllmTritonJitKernel._kernel_arg_names",
    why="kernels that such an object holds are replaced, and its cached names removed",
    versions="<0.31",
)
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
                # A vLLM object that launches a kernel it holds and caches the kernel's argument names.
                value.kernel = replacement
                vars(value).pop("_kernel_arg_names", None)
    setattr(owner, attribute, replacement)


def _holds(value: Any, kernel: Any) -> bool:
    return hasattr(value, "__dict__") and vars(value).get("kernel") is kernel
