"""Whatever depends on private source of vLLM has a guard, and every guard reacts to a changed line of its target."""

from __future__ import annotations

import ast
import builtins
import copy
import dataclasses
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy
import pytest
import torch

import vllm_backplane
from vllm_backplane import guards
from vllm_backplane.binding.operator_callers import HOOKS, RUNNER_KERNEL
from vllm_backplane.binding.registry import BINDINGS
from vllm_backplane.settings.releases import NEWEST, RELEASES
from vllm_patchbay.errors import PatchError
from vllm_patchbay.patch import Guard, GuardedPackage, Guards, Outcome
from vllm_patchbay.patch.guard import Record, verify_guard
from vllm_patchbay.patch.mentions import statements_with
from vllm_patchbay.upstream import SourceTree, SymbolIndex, in_range, installed_tree, open_tree
from vllm_patchbay.upstream.modules import Binds

sys.path.insert(0, str(Path(__file__).parent / "versions"))
from own_names import Presence

FOLDER = Path(vllm_backplane.__file__).parent
PACKAGE = GuardedPackage.find("vllm_backplane")
GUARDS = PACKAGE.guards()
TARGETS = {guard.target for guard in GUARDS}

INTERFACES = {
    *("Platform", "DeviceCommunicatorBase", "BaseModelLoader", "CustomOp"),
    *("AttentionBackend", "AttentionImpl", "MLAAttentionImpl", "AttentionMetadataBuilder", "MLAPrefillBackend"),
    *("KVConnectorBase_V1", "KVConnectorStats", "KVConnectorPromMetrics", "AsyncModelRunnerOutput"),
    *("KVConnectorWorkerMetadata", "IOProcessor", "StatLoggerBase", "AggregateStatLoggerBase"),
    *("QuantizationConfig", "QuantizeMethodBase", "FusedMoEMethodBase", "MPLinearKernel", "ScaledMMLinearKernel"),
    *("PunicaWrapperABC", "PunicaWrapperBase"),
}
"""Classes of vLLM that are made for subclasses of other packages. Their public methods need no guard."""
REPLACED_WHOLE = {
    "get_min_capability": "which cards of CUDA can compute a format does not apply to other devices",
    "get_supported_act_dtypes": "the device decides which dtypes it computes in",
}
"""Methods that our mixins replace, and why vLLM's versions of them do not matter."""
NOT_OF_VLLM = {"_asdict", "_parameters", "_cdata"}
"""Private names of Python and PyTorch that are read from objects of unknown kind."""


@cache
def package() -> Presence:
    return Presence(FOLDER, [installed_tree()])


@cache
def upstream() -> SymbolIndex:
    return SymbolIndex(open_tree(NEWEST.version))


@cache
def sources() -> dict[str, ast.Module]:
    return {path.relative_to(FOLDER).as_posix(): ast.parse(path.read_text()) for path in sorted(FOLDER.rglob("*.py"))}


def place_of(file: str) -> str:
    return "vllm_backplane." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def targets_of(file: str) -> set[str]:
    return {guard.target for guard in GUARDS if guard.place == place_of(file)}


def is_guarded(path: str, targets: Iterable[str]) -> bool:
    """Returns whether one of the targets is the function, or the class that has it."""
    return any(path == target or path.startswith(f"{target}.") for target in targets)


# --- what depends on vLLM


def calls_super(file: str, name: str) -> bool:
    """Returns whether a method mentions the one that it overrides."""
    owner, _, method = name.rpartition(".")
    for node in ast.walk(sources()[file]):
        if isinstance(node, ast.ClassDef) and node.name == owner.rpartition(".")[2]:
            for each in node.body:
                if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) and each.name == method:
                    calls = {ast.unparse(call.func) for call in ast.walk(each) if isinstance(call, ast.Call)}
                    steps = calls_of_own_methods(node, calls)
                    passed = {ast.unparse(part) for part in ast.walk(each) if isinstance(part, ast.Attribute)}
                    passed |= {f"super().{read_name(part)}" for part in ast.walk(each) if is_of_super(part)}
                    return f"super().{method}" in passed | steps
    raise AssertionError(f"{file} has no {name}")


def is_of_super(node: ast.AST) -> bool:
    """Returns whether an expression is a `getattr` of the base class."""
    return isinstance(node, ast.Call) and bool(node.args) and ast.unparse(node.args[0]) == "super()"


def calls_of_own_methods(owner: ast.ClassDef, calls: set[str]) -> set[str]:
    """Returns what the methods of the class call that are among the calls of `self`."""
    own = [each for each in owner.body if isinstance(each, ast.FunctionDef) and f"self.{each.name}" in calls]
    return {ast.unparse(call.func) for each in own for call in ast.walk(each) if isinstance(call, ast.Call)}


def overrides() -> Iterator[str]:
    """Finds overrides of private methods and attributes, and methods that replace vLLM's without calling it or that
    our mixins have: they depend on a class that is not named in their source."""
    for ours, by_version in package().defined.items():
        [found] = by_version.values()
        origin = package().origins.get(ours, ours)
        file, _, name = origin.partition(":")
        method = name.rpartition(".")[2]
        if not found.is_found or not found.path.startswith("vllm.") or found.symbol is None:
            continue
        if found.symbol.binds is Binds.INSTANCE:  # set by a constructor, which has a guard
            continue
        is_dunder = method.startswith("__")
        is_private = method.startswith("_") and not is_dunder
        is_of_interface = found.path.partition(":")[2].partition(".")[0] in INTERFACES
        targets = targets_of(file) | targets_of(ours.partition(":")[0])
        if found.symbol.binds in (Binds.ASSIGNMENT, Binds.ANNOTATION):
            is_safe = method in names_of(targets)
        elif origin != ours:
            is_safe = is_of_interface or method in REPLACED_WHOLE or is_guarded(found.path, targets)
        else:
            replaces = is_private or (not is_of_interface and not calls_super(file, name))
            is_safe = not replaces or is_guarded(found.path, targets)
        if not is_safe:
            yield f"{ours} overrides {found.path}"


def layers() -> Iterator[str]:
    """Finds layers that replace vLLM's computation through a hook, `forward_oot`, which has no body of its own."""
    for binding in BINDINGS:
        module, _, name = binding.replacement.partition(":")
        cls = getattr(importlib.import_module(module), name)
        if any(
            "forward_oot" in vars(base) for base in cls.__mro__ if base.__module__.startswith("vllm_backplane.")
        ) and not any(
            guard.place == module and is_guarded(f"{binding.upstream}.forward_native", [guard.target])
            for guard in GUARDS
        ):
            yield f"{binding.replacement} computes {binding.upstream}"


def private_methods() -> Iterator[str]:
    """Finds calls of private methods of vLLM by classes that are derived from vLLM's."""
    for ours, by_version in package().read.items():
        [found] = by_version.values()
        is_method = found.is_found and found.symbol is not None and found.symbol.binds is not Binds.INSTANCE
        is_private = ours.rpartition(".")[2].startswith("_")
        is_safe = is_guarded(found.path, targets_of(ours.partition(":")[0]))
        if is_method and is_private and found.path.startswith("vllm.") and not is_safe:
            yield f"{ours} reads {found.path}"


def names_of(targets: Iterable[str]) -> set[str]:
    """Returns all names, also those in texts, in the source of some functions and classes of vLLM."""
    return {name for target in targets for name in names_in(target)}


@cache
def names_in(target: str) -> frozenset[str]:
    module, _, name = target.partition(":")
    if not upstream().resolve(module, name).is_found:
        return frozenset()
    names: set[object] = set()
    for each in ast.walk(ast.parse(upstream().normalized_source_of(module, name))):
        parts = (getattr(each, field, None) for field in ("attr", "id", "name", "arg", "value"))
        names |= {part for part in parts if isinstance(part, str)}
    return frozenset(map(str, names))


@cache
def own_names() -> frozenset[str]:
    """Returns all names that the package defines or sets."""
    names: set[str] = set()
    for tree in sources().values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "vars(self)":
                names |= {node.slice.value} if isinstance(node.slice, ast.Constant) else set()
    return frozenset(names)


def imported(tree: ast.Module) -> dict[str, str]:
    """Maps the names that a file imports to the top-level package."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(each.asname or each.name).partition(".")[0]: each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name: (node.module or "").partition(".")[0] for each in node.names}
    return found


def root_of(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_names() -> Iterator[str]:
    """Finds private attributes of vLLM's objects, and private names that are imported from vLLM."""
    for file, tree in sources().items():
        origins = imported(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                for each in node.names:
                    if each.name.startswith("_") and f"{node.module}:{each.name}" not in targets_of(file):
                        yield f"{file}:{node.lineno} imports {each.name}"
            name, origin = read_name(node), node.args[0] if isinstance(node, ast.Call) and node.args else node
            if name.startswith("_") and not name.startswith("__"):
                is_ours = name in own_names() or origins.get(root_of(origin), "vllm") != "vllm"  # type: ignore[arg-type]
                if not is_ours and name not in names_of(targets_of(file)) | NOT_OF_VLLM:
                    yield f"{file}:{node.lineno} reads {ast.unparse(node)}"  # type: ignore[attr-defined]


def read_name(node: ast.AST) -> str:
    """Returns the name of the attribute that an expression reads or tests for, or an empty string."""
    if isinstance(node, ast.Attribute):
        return node.attr
    is_call = isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and len(node.args) > 1
    if is_call and isinstance(node.args[1], ast.Constant):  # type: ignore[attr-defined]
        return str(node.args[1].value)  # type: ignore[attr-defined]
    return ""


NO_OBJECTS_OF_VLLM = ("patches/", "cli/", "doctor/", "device/", "devices/", "host/", "ops/", "gguf/", "errors.py")
"""Files that set attributes of their own objects and of other libraries' only, and patches, which are declared."""
SET_IN_VLLM = {
    ("bench/", "disable_log_stats"): "it is a public argument of vLLM's engine",
    ("chat/endpoint.py", "sock"): "it is for a connection of http.client",
    ("early_checks/vllm_options.py", "setattr"): "it is for a namespace of argparse",
    ("quantization/", "g_idx"): "quantization methods register and remove the parameters of their layer",
    ("quantization/", "setattr"): "quantization methods register and remove the parameters of their layer",
    ("quantization/checkpoint/compressed_tensors.py", "weight_loader_numel"): "it is for vLLM's count of loaded values",
    ("quantization/checkpoint/experts.py", "features"): "the module is one of Backplane",
    ("models/dequantized.py", "hf_quantizer"): "it is for a model of transformers",
    ("models/dequantized.py", "model_max_length"): "it is for a tokenizer of transformers",
    ("models/dequantized.py", "pre_tokenizer"): "it is for a tokenizer of transformers",
    ("process/start_signals.py", "daemon"): "it is for a thread",
    ("process/vllm_torch.py", "setattr"): "it is for torch, whose module vLLM sees through a view",
    ("runner/triton_replacements.py", "__signature__"): "it is for a function of Backplane",
    ("start_display/left_out.py", "levelname"): "it is for a record of logging",
    ("start_display/left_out.py", "levelno"): "it is for a record of logging",
    ("settings/compat.py", "setattr"): "the kernels that are replaced have guards in runner/triton_replacements.py",
}
"""What the package sets in objects of vLLM or of an unknown kind, and why it needs no guard in that file."""


SEES_NO_MODULES = {
    ("metrics/entry_point.py", "sys.meta_path"): "its finder finds a distribution, and no modules",
}
"""Where the package uses something that could change vLLM's modules, and why it does not."""


def writes() -> Iterator[str]:
    """Finds code that sets something in vLLM's modules, classes and objects, or goes through all modules to do so."""
    for file, tree in sources().items():
        if file.startswith(NO_OBJECTS_OF_VLLM):
            continue
        names = names_of(targets_of(file))
        for place, name in sets_in_vllm(tree):
            if name not in names and not any(file.startswith(prefix) and name == k for prefix, k in SET_IN_VLLM):
                yield f"{file}:{place.lineno} sets {ast.unparse(place)}"
        for node in ast.walk(tree):
            text = ast.unparse(node.func if isinstance(node, ast.Call) else node) if is_expression(node) else ""
            if text in ("sys.modules", "sys.meta_path", "for_each_module", "when_imported") and not names:
                if (file, text) in SEES_NO_MODULES:
                    continue
                yield f"{file}:{node.lineno} uses {text}"  # type: ignore[attr-defined]


def is_expression(node: ast.AST) -> bool:
    return isinstance(node, (ast.Attribute, ast.Call))


def sets_in_vllm(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Yields the statements that may set an attribute of an object of vLLM, with the attribute's name. Attributes that
    our classes have, and public fields of vLLM's configuration, may be set."""
    origins = imported(tree)
    own = names_bound_in(tree)
    for node in ast.walk(tree):
        for owner, name in written(node):
            root = root_of(owner)
            is_of_vllm = origins.get(root) == "vllm"
            is_ours = root in own or (root in origins and not is_of_vllm) or name.startswith("backplane_")
            is_known = ast.unparse(owner) in ("self", "cls") or name in own_attributes() | configuration_fields()
            if is_of_vllm or not (is_ours or is_known or name.isupper()):
                yield node, name  # type: ignore[misc]


def written(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Yields the objects and the attributes that a statement or call sets, changes or deletes."""
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
        name = ast.unparse(node.args[1]).strip("_'")  # a constant of ours is in upper case
        yield node.args[0], name if name.isupper() or isinstance(node.args[1], ast.Constant) else "setattr"
    for target in [part for each in targets for part in (each.elts if isinstance(each, ast.Tuple) else [each])]:
        held = target
        while isinstance(held, ast.Subscript):
            held = held.value
        if isinstance(held, ast.Attribute):
            yield held.value, held.attr


@cache
def own_attributes() -> frozenset[str]:
    """Returns the names of attributes that classes of the package define, or set on their objects."""
    names: set[str] = set()
    for tree in sources().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names |= names_bound_in(node)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return frozenset(names)


@cache
def configuration_fields() -> frozenset[str]:
    """Returns the public fields of vLLM's configuration, which its platforms may set."""
    tree = upstream().tree_of("vllm")
    assert tree is not None
    modules = [ast.parse(tree.read(module) or "") for module in tree.modules() if module.startswith("vllm.config.")]
    classes = [node for module in modules for node in module.body if isinstance(node, ast.ClassDef)]
    return frozenset(name for each in classes for name in names_bound_in(each) if not name.startswith("_"))


def names_bound_in(node: ast.ClassDef | ast.Module) -> set[str]:
    """Returns what the body of a class or module binds, imports apart."""
    names = {each.name for each in node.body if isinstance(each, (ast.FunctionDef, ast.ClassDef))}
    names |= {ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)}
    return names | {ast.unparse(part) for each in node.body if isinstance(each, ast.Assign) for part in each.targets}


SKIPPED = sorted({guard.target for guard in GUARDS if guard.fast_path and not guard.target.endswith(".__init__")})
"""What a fast path skips, keeps the result of, or reads without calling it."""
CALLED_IN_EVERY_STEP = {
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": "the fast path begins in what it calls",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states": "it has run, and has written the batch",
    "vllm.v1.utils:CpuGpuBuffer": "only its arrays are used",
}
"""Targets of a fast path that call the same functions without the fast path."""
NOT_CALLED = {
    "_calc_mrope_positions": "there is no fast path with M-RoPE",
    "set_active_loras": "there is no fast path with LoRA",
    "bisect_left": "there is no fast path with LoRA",
    **dict.fromkeys(
        (
            *("_calc_spec_decode_metadata", "update_num_computed_tokens_for_batch_change", "async_tensor_h2d"),
            *("synchronize", "set_per_group_attn_metadata", "set_per_group_block_table", "unpadded"),
        ),
        "there is no fast path with speculation",
    ),
    "wait": "there is no fast path while tokens are received from another pipeline stage",
    "get_dcp_local_seq_lens": "there is no fast path with context parallelism",
    "split_attn_metadata": "there is no fast path with two batches at once",
    "_prepare_kv_sharing_fast_prefill": "there is no fast path with this option",
    "coordinate_batch_across_dp": "with data parallelism, nothing is kept",
    "CUDAGraphStat": "with these metrics, nothing is kept",
    "_get_encoder_seq_lens": "with an encoder, nothing is kept",
    **dict.fromkeys(("compute_mm_prefix_ranges", "get_sliding_window"), "with multimodal prefixes, nothing is kept"),
    "_COMPUTE_SLOT_MAPPING_KERNEL": "the kernel of its class and its call have guards",
    **dict.fromkeys(("CUDAGraphMode", "BatchDescriptor", "CommonAttentionMetadata"), "it holds what it is given"),
    **dict.fromkeys(("valid_runtime_modes", "separate_routine", "has_mode"), "the mode does not change"),
    "build_metadata_for_cudagraph_capture": "it is for CUDA's graphs",
    **dict.fromkeys(("build", "update_block_table", "map_to_kernel_block_table"), "the builder is one of Backplane"),
}
"""Functions that are called in `SKIPPED`, and why decode steps with a fast path do not depend on them."""
PYTHON_AND_TORCH = {
    name
    for owner in (torch, torch.Tensor, numpy, numpy.ndarray, builtins, dict, list, copy, dataclasses)
    for name in dir(owner)
}
"""Names of functions that are not vLLM's if they are called on an object of unknown kind."""


def skipped_calls() -> Iterator[str]:
    """Finds functions that vLLM calls in what a fast path skips."""
    targets = {guard.target for guard in GUARDS}
    for path in SKIPPED:
        for name, called in calls_of(path) if path not in CALLED_IN_EVERY_STEP else ():
            is_known = name in NOT_CALLED or (not called and name in PYTHON_AND_TORCH)
            if not is_known and not is_guarded(called or method_of_a_target(name, targets), targets):
                yield f"{path} calls {name}"


def calls_of(path: str) -> Iterator[tuple[str, str]]:
    """Yields the name of each function that one function of vLLM calls, and its path if that is known."""
    module, _, name = path.partition(":")
    tree, owner = ast.parse(upstream().normalized_source_of(module, name)), name.rpartition(".")[0]
    own = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name) and called.id not in own:
            found = upstream().resolve(module, called.id)
            yield called.id, found.path if found.symbol is not None else ""  # or it is imported from elsewhere
        elif isinstance(called, ast.Attribute):
            found = upstream().resolve(module, f"{owner}.{called.attr}")
            yield called.attr, found.path if found.is_found and ast.unparse(called.value) == "self" else ""


def method_of_a_target(name: str, targets: Iterable[str]) -> str:
    """Returns the path of a method by its name alone if it is a target, or if the class that has it is one."""
    for target in targets:
        found = upstream().resolve(*f"{target}.{name}".split(":"))
        if target.endswith(f".{name}") or found.is_found:
            return target
    return ""


REPLACED_IN_TORCH = {
    "torch.Event",
    *(f"torch.cuda.{name}" for name in ("Event", "Stream", "current_stream", "stream", "set_stream")),
    *(f"torch.accelerator.{name}" for name in ("synchronize", "empty_cache", "empty_host_cache", "get_memory_info")),
}
"""What `process/vllm_torch.py` replaces in vLLM's view of torch."""
NOT_REACHED = {
    "vllm.v1.worker.xpu": "another platform",
    "vllm.v1.worker.cpu": "another platform",
    "vllm.v1.worker.ubatching": "two batches at once need the all-to-all kernels of CUDA",
    "vllm.v1.worker.gpu_ubatch_wrapper": "two batches at once need the all-to-all kernels of CUDA",
    "vllm.v1.worker.gpu.ubatch_utils": "two batches at once need the all-to-all kernels of CUDA",
    "vllm.v1.worker.mm_encoder_model_runner": "the worker creates the runners of Backplane only",
    "vllm.v1.worker.gpu_worker:Worker.sleep": "overridden, with a guard in worker/worker.py",
    "vllm.v1.worker.gpu_worker:Worker.init_device": "overridden, with a guard in worker/worker.py",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sync_device": "overridden, with a guard in runner/v1.py",
    "vllm.v1.worker.gpu.cudagraph_utils": "graphs with the V2 runner are refused (config/graphs.py)",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.capture_model": "graphs with the V2 runner are refused",
    "vllm.v1.worker.gpu.mm.encoder_runner:EncoderRunner.capture": "graphs with the V2 runner are refused",
    "vllm.v1.worker.gpu.warmup": "the worker of Backplane warms up",
    "vllm.v1.worker.gpu.async_utils:_timing_event": "an argument of CUDA's events for traces",
    "vllm.v1.worker.gpu.spec_decode.adaptive_verification": "it is for graphs",
    "vllm.v1.spec_decode.gemma4": "its graphs are CUDA's",
    "vllm.v1.sample.ops.topk_topp_triton": "the sampler of Backplane calls no Triton kernel",
    "vllm.utils.mem_utils:MemorySnapshot": "the worker of Backplane measures memory",
    "vllm.utils.mem_utils:memory_profiling": "the worker of Backplane measures memory",
    "vllm.utils.multi_stream_utils": "it runs on a second stream, which only CUDA's platform has",
    "vllm.utils.torch_utils:aux_stream": "only CUDA's platform has this stream",
    "vllm.utils.torch_utils:": "the module replaces torch.cuda.set_stream; a stand-in has none to replace",
    "vllm.lora.layers": "only CUDA's platform has this stream",
    "vllm.model_executor.layers.fused_moe.runner.shared_experts": "only CUDA's platform has this stream",
    "vllm.model_executor.models.cohere2_moe": "a test of the platform excludes all but CUDA's",
    **dict.fromkeys(
        (
            *("vllm.models.beam", "vllm.models.common.ops", "vllm.models.deepseek_v4", "vllm.models.flint"),
            *("vllm.models.inkling", "vllm.models.kimi_k3", "vllm.models.minimax_m3", "vllm.models.muse_spark"),
            *("vllm.models.qwen4_exp", "vllm.models.step5"),
        ),
        "the model is written in kernels of CUDA or ROCm, and Backplane replaces no layer of it",
    ),
    "vllm.benchmarks.": "a program of its own",
    "vllm.platforms.xpu": "another platform",
    **dict.fromkeys(
        (
            *("vllm.model_executor.kernels.linear.cute_dsl", "vllm.model_executor.kernels.linear.mixed_precision"),
            *("vllm.model_executor.layers.fused_moe.deep_gemm_mega_moe", "vllm.multimodal.video_decoders.deepstream"),
            *("vllm.model_executor.layers.fused_moe.oracle.w4a8", "vllm.multimodal.video_decoders.pynvvideocodec"),
            "vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht",
        ),
        "it is for kernels and libraries of CUDA",
    ),
    **dict.fromkeys(
        (
            "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod._maybe_pad_weight",
            "vllm.model_executor.layers.quantization.mxfp4:Mxfp4MoEMethod._setup_kernel_k3_situ_gfx942",
            "vllm.model_executor.layers.quantization.quark",
            "vllm.model_executor.layers.quantization.utils.fp8_utils",
            *("vllm.v1.attention.backends.mla.rocm", "vllm.v1.attention.backends.rocm", "vllm.v1.attention.ops.flydsl"),
        ),
        "it is for ROCm",
    ),
    "vllm.v1.attention.backends.mla.index_group": "sparse attention is refused (attention/selection.py)",
    "vllm.v1.attention.ops.cp_common": "context parallelism without copies needs CUDA's symmetric memory",
    "vllm.v1.attention.ops.dcp": "context parallelism without copies needs CUDA's symmetric memory",
    "vllm.v1.hisparse": "it needs Triton (device/triton_features.py)",
    "vllm.model_executor.warmup.": "the worker of Backplane warms up",
    "vllm.model_executor.layers.mamba.mamba_mixer2": "the layer of Backplane has its own computation",
    "vllm.model_executor.layers.mamba.gdn": "the layer of Backplane has its own computation",
    "vllm.compilation.breakable_cudagraph": "its graphs are CUDA's",
    "vllm.device_allocator.": "the worker of Backplane allocates, sleeps and wakes",
    "vllm.distributed.device_communicators.": "the communicator is one of Backplane or of the device",
    "vllm.distributed.elastic_ep": "it needs balancing of experts, which is refused",
    "vllm.distributed.eplb": "balancing of experts is refused",
    "vllm.model_executor.model_loader.weight_cache": "it shares memory of CUDA between processes",
    "vllm.model_executor.models.gemma4_unified": "it is for tensors of CUDA",
    "vllm.model_executor.offloader.prefetch": "it raises: it exchanges weights of CUDA for those in pinned memory",
    **dict.fromkeys(
        (
            *("vllm.distributed.ec_transfer.ec_connector.cpu", "vllm.distributed.ec_transfer.ec_connector.mooncake"),
            *("vllm.v1.kv_offload.cpu", "vllm.v1.simple_kv_offload"),
        ),
        "it copies with an operator of CUDA, and raises before if the platform or the stream is another one",
    ),
    **dict.fromkeys(
        (
            f"vllm.distributed.kv_transfer.kv_connector.v1.{name}"
            for name in ("hf3fs", "hisparse", "lmcache", "mooncake", "moriio", "nixl")
        ),
        "its library needs a platform of its own: CUDA's, ROCm's, or one that declares support of it",
    ),
    **dict.fromkeys(
        (
            f"vllm.distributed.weight_transfer.{name}"
            for name in ("ipc_engine", "m2n", "nccl_engine", "packed_tensor", "sharded_rdt", "sparse_nccl")
        ),
        "it is for the trainer, or receives through libraries of CUDA",
    ),
}
"""Modules and functions, and why a server with Backplane does not run them. A test checks that each uses a name."""


@cache
def uses_of_torch() -> dict[str, int]:
    """Returns the functions of vLLM that use a replaced name of torch in their code, with the number of uses."""
    tree, found = installed_tree(), dict[str, int]()

    def visit(node: ast.AST, module: str, name: str) -> None:
        annotations = (getattr(node, "annotation", None), getattr(node, "returns", None))
        for each in ast.iter_child_nodes(node):
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                visit(each, module, f"{name}.{each.name}" if name else each.name)
                continue
            if each in annotations:
                continue
            if isinstance(each, ast.Attribute) and ast.unparse(each) in REPLACED_IN_TORCH:
                found[f"{module}:{name}"] = found.get(f"{module}:{name}", 0) + 1
            visit(each, module, name)

    for module in tree.modules():
        source = tree.read(module) or ""
        if any(name in source for name in REPLACED_IN_TORCH):
            visit(ast.parse(source), module, "")
    return found


def streams() -> Iterator[str]:
    """Finds functions of vLLM that use the replaced streams, events and calls of torch."""
    targets = targets_of("process/vllm_torch.py")
    for path in uses_of_torch():
        if not is_guarded(path, targets) and not any(is_reason(path, prefix) for prefix in NOT_REACHED):
            yield path


def is_reason(path: str, prefix: str) -> bool:
    return path == prefix if prefix.endswith(":") else path.startswith(prefix)


SEARCHES = {
    overrides: (
        *("GPUModelRunner._prepare_inputs", "Worker.init_device", "Sampler.apply_penalties", "CUDAGraphWrapper"),
        *("Platform._enum", "StateMetadataBuilder._cudagraph_support", "BackplaneAsyncScheduler.update_from_output"),
    ),
    layers: ("activation:SiluAndMul", "yarn_scaling_rope:YaRNScalingRotaryEmbedding"),
    private_methods: ("PunicaWrapperBase._update_base_metadata", "MambaMixer._ssm_transform"),
    private_names: ("_convert_to_tensors", "layer._k_scale_float", "runner._pp_recv_work", "_all_instances"),
    skipped_calls: ("calls copy_to_gpu", "calls dispatch", "calls _is_uniform_decode", "calls build_metadata"),
    writes: (
        *("envs.environment_variables", "for_each_module", "sys.modules"),
        *("runner.sampler = ", "batch.request_lora_mapping[place] = "),
    ),
    streams: (
        *("gpu_model_runner:GPUModelRunner.__init__", "worker_base:WorkerBase.synchronize_device"),
        *("gemma4_mm:Gemma4ForConditionalGeneration", "weight_transfer.base:WeightTransferEngine.update_weights"),
    ),
}
"""Searches for code that depends on vLLM, and some of what each finds if there are no guards."""


@pytest.mark.parametrize("search", SEARCHES)
def test_what_depends_on_vllm_has_guards(search) -> None:
    assert list(search()) == []


@pytest.mark.parametrize("search", SEARCHES)
def test_the_search_finds_code_without_a_guard(search, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "GUARDS", [])
    found = list(search())
    for name in SEARCHES[search]:
        assert any(name in each for each in found), name


def test_reasons_and_exceptions_are_needed() -> None:
    for prefix in NOT_REACHED:
        assert any(is_reason(path, prefix) for path in uses_of_torch()), prefix
    set_in_vllm = [(file, name) for file, tree in sources().items() for _, name in sets_in_vllm(tree)]
    for prefix, name in SET_IN_VLLM:
        assert any(file.startswith(prefix) and name == each for file, each in set_in_vllm), (prefix, name)
    assert set(CALLED_IN_EVERY_STEP) <= set(SKIPPED)
    called = {name for path in SKIPPED for name, _ in calls_of(path)}
    assert set(NOT_CALLED) <= called, set(NOT_CALLED) - called
    for name in NOT_OF_VLLM - {"_asdict"}:
        assert hasattr(torch.nn.Module(), name) or hasattr(torch.UntypedStorage, name), name
    used = {found.path.partition(":")[2] for by in package().defined.values() for found in by.values()}
    for name in REPLACED_WHOLE:
        assert any(ours.endswith(f".{name}") and package().origins.get(ours) for ours in package().defined), name
    for name in INTERFACES:
        assert any(path.startswith(f"{name}.") for path in used), name


def test_what_is_replaced_in_torch_is_what_the_search_looks_for() -> None:
    found = {"torch.Event"}
    for node in ast.walk(sources()["process/vllm_torch.py"]):
        owner = {"_cuda.replace": "cuda", "_accelerator.replace": "accelerator"}.get(
            ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        )
        if owner:
            assert isinstance(node, ast.Call)
            found |= {f"torch.{owner}.{each.arg}" for each in node.keywords if each.arg}
    assert found == REPLACED_IN_TORCH


def test_replaced_kernels_have_guards() -> None:
    kernels = {hook.upstream for hook in HOOKS if hook.kind == RUNNER_KERNEL}
    assert len(kernels) == 11
    assert kernels <= TARGETS


# --- the guards


def test_every_feature_is_used() -> None:
    """A class uses its feature when it is constructed. Other code calls `use_feature`, also with the names of the
    model's classes and of the KV connector."""
    automatic, called = set(), set()
    for tree in sources().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "use_feature":
                called.add(ast.unparse(node.args[0]).strip("'"))
            for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else ():
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "guarded":
                    automatic |= {ast.literal_eval(e.value) for e in decorator.keywords if e.arg == "feature"}
    assert called >= {"kind.__name__", "transfer.kv_connector"}
    of_vllm = {guard.feature for guard in GUARDS if upstream().resolve(guard.module, guard.feature).is_class}
    features = {guard.feature for guard in GUARDS} - {""}
    assert features == automatic | of_vllm | {name for name in called if "." not in name}
    assert {"speculation", "V1 model runner", "V2 model runner", "LoRA", "experts"} <= features


def test_guards_of_the_fast_path_are_verified_before_it_is_chosen() -> None:
    """The runner chooses when it has loaded its model. Guards in modules that it imports later are not verified yet."""
    statements = [each for each in sources()["runner/v1.py"].body if isinstance(each, ast.ImportFrom)]
    verified = {place_of("runner/v1.py"), *(each.module for each in statements)}
    assert {guard.place for guard in GUARDS if guard.fast_path} <= verified


def test_every_guard_fits_the_newest_release_and_is_recorded_for_all() -> None:
    verdicts = PACKAGE.verify(upstream(), NEWEST.version)
    for guard, verdict in verdicts:
        is_for_it = not guard.versions or in_range(NEWEST.version, guard.versions)
        assert verdict.outcome is (Outcome.FITS if is_for_it else Outcome.NOT_NEEDED), verdict
    targets = Record.read(PACKAGE.record_file).targets
    for guard in GUARDS:
        of_key = [each.versions for each in GUARDS if each.key == guard.key]
        of_guard = [
            each.version for each in RELEASES if any(not some or in_range(each.version, some) for some in of_key)
        ]
        recorded = sorted(release for releases in targets[guard.key].values() for release in releases)
        assert recorded == of_guard, guard.key


@pytest.mark.slow
def test_what_a_process_declares_is_what_the_source_has() -> None:
    for place in {guard.place for guard in GUARDS}:
        importlib.import_module(place)
    assert set(guards._GUARDS.declared) == set(GUARDS)


def changed(tree: SourceTree, functions: Iterable[Guard], with_mentions: bool = True) -> SourceTree:
    """Returns a tree with one more statement in each of some functions and classes, and with one more for each name
    that a guard looks for."""
    result, original = copy.copy(tree), tree.read

    @cache
    def read(module: str) -> str | None:
        source = original(module)
        names: dict[str, list[str]] = {}
        for guard in functions:
            if guard.module == module:
                names.setdefault(guard.name, ["1"]).extend(guard.mentions if with_mentions else ())
        if source is None or not names:
            return source
        parsed = ast.parse(source)
        assert names.keys() >= set(insert(parsed, names)), module
        return ast.unparse(parsed)

    result.read = read  # type: ignore[method-assign]
    return result


def insert(tree: ast.AST, names: Mapping[str, list[str]], within: str = "") -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{within}{node.name}"
            if name in names:
                node.body += ast.parse("\n".join(f"changed_line = {value}" for value in names[name])).body
                yield name
            yield from insert(node, names, f"{name}.")
        elif isinstance(node, (ast.If, ast.Try)):
            yield from insert(node, names, within)


@cache
def changed_index(version: str, with_mentions: bool = True) -> SymbolIndex:
    return SymbolIndex(changed(open_tree(version), GUARDS, with_mentions))


def cases() -> Iterator[object]:
    """Yields each guard with a release that it is for: the newest, or an older one, which has to be downloaded."""
    for guard in GUARDS:
        of_guard = [each.version for each in RELEASES if not guard.versions or in_range(each.version, guard.versions)]
        marks = () if of_guard[-1] == NEWEST.version else (pytest.mark.download, pytest.mark.exhaustive)
        yield pytest.param(guard, of_guard[-1], id=f"{guard.place}-{guard.key}", marks=marks)


@pytest.mark.parametrize(("guard", "version"), list(cases()))
def test_every_guard_reacts_to_a_changed_line(guard: Guard, version: str) -> None:
    found = Guards(PACKAGE.record_file, "THE_SETTING")
    found.guarded(
        guard.target,
        why=guard.why,
        fast_path=guard.fast_path,
        versions=guard.versions,
        feature=guard.feature,
        mentions=guard.mentions,
    )(lambda: None)
    if guard.feature:
        found.verify(lambda: changed_index(version), version)  # a server without the feature starts
    if guard.fast_path:
        found.verify(lambda: changed_index(version), version, guard.feature)
        assert list(found.switched_off) == [guard.fast_path]
        assert guard.target in found.switched_off[guard.fast_path]
    else:
        with pytest.raises(PatchError) as fault:
            found.verify(lambda: changed_index(version), version, guard.feature)
        for value in guard.mentions or ("1",):
            assert f"changed_line = {value}" in str(fault.value)
        assert guard.target in str(fault.value)
    if guard.mentions:
        record = Record.read(PACKAGE.record_file)
        assert verify_guard(guard, record, changed_index(version, False), version).outcome is Outcome.FITS
    assert {guard.fast_path for guard in GUARDS} == {"", "decode steps"}


def test_each_mentioned_name_is_in_the_source() -> None:
    """A name that vLLM has nowhere would be compared with nothing. `torch.accelerator` may be used in a release to
    come."""
    for guard in GUARDS:
        whole = upstream().normalized_source_of(guard.module, guard.name) if guard.mentions else ""
        for name in set(guard.mentions) - REPLACED_IN_TORCH - {"torch.accelerator"}:
            assert statements_with([name], whole) != statements_with(["no_such_name"], whole), f"{guard.key}: {name}"


def test_a_change_concerns_the_guards_of_its_function_only() -> None:
    target = "vllm.v1.spec_decode.utils:copy_and_expand_dflash_inputs_kernel"
    [one] = [guard for guard in GUARDS if guard.target == target]
    index, record = SymbolIndex(changed(open_tree(NEWEST.version), [one])), Record.read(PACKAGE.record_file)
    drifted = [g.target for g in GUARDS if verify_guard(g, record, index, NEWEST.version).outcome is Outcome.DRIFTED]
    assert drifted == [target]
