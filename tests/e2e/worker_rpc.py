"""What tests ask of a worker, in its own process: functions that vLLM's `collective_rpc` calls with the worker.

Functions travel by name, which vLLM does only with RPC_VARIABLES among the variables.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import cycle
from typing import Any

RPC_VARIABLES = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


def memory(worker: Any) -> dict[str, Any]:
    """The device's own account of every card, beside the memory of all tensors that Python can find."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    device = worker.accelerator
    device.synchronize()
    gc.unfreeze()  # what is frozen is not listed
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and not isinstance(each, FakeTensor)]

    def taken(some: Iterable[torch.Tensor]) -> int:
        storages = [one.untyped_storage() for one in some if one.device == worker.device]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    return {
        "card": worker.card,
        "held": [device.own_memory(card) for card in range(worker.runtime.selection.probe.count)],
        "tensors": taken(tensors),
        "weights": taken(worker.get_model().parameters()),
        "kv_cache": worker._kv_storage.bytes,
    }


def parameters(worker: Any) -> dict[str, str]:
    """What each parameter holds, in short."""
    import hashlib

    return {
        name: hashlib.sha256(parameter.detach().cpu().numpy().tobytes()).hexdigest()
        for name, parameter in worker.get_model().named_parameters()
    }


class InputComparison:
    """Prepares the inputs of decode steps in two ways, by runner/decode_inputs.py and by vLLM, and compares all buffers
    of the runner afterwards.

    Both ways start from the same contents. In buffers that vLLM does not read these are other than what the last step
    left: a write that is left out shows although it would repeat the values of the step before.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.steps = 0
        self.unread: set[str] | None = None
        self.found: set[str] = set()
        self.written: set[str] = set()
        self.reported: list[list[str]] = []
        self.left_out: list[str] = []
        runner._prepare_inputs = self.prepare

    def prepare(self, scheduler_output: Any, tokens: Any) -> Any:
        """Takes the place of the runner's own method, and returns what vLLM's way gives."""
        from runner_buffers import Saved, differences, read, unread_buffers
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        runner = self.runner
        vllms_way = partial(GPUModelRunner._prepare_inputs, runner, scheduler_output, tokens)
        if self.unread is None:
            if runner.decode_inputs.prepare(tokens) is not None:
                self.unread = unread_buffers(runner, vllms_way)
            return vllms_way()
        start = Saved(runner)
        start.invert(*self.unread & start.buffers.keys())
        changed = Saved(runner)
        before = read(runner)
        ours = runner.decode_inputs.prepare(tokens)
        if ours is not None:
            after_ours = read(runner) | self._described(ours)
            changed.restore()
            vllms = vllms_way()
            after_vllms = read(runner)
            self.steps += 1
            self.found |= before.keys()
            self.written |= differences(before, after_vllms)
            self.reported.append(sorted(differences(after_ours, after_vllms | self._described(vllms))))
        start.restore()
        return vllms_way()

    def _described(self, result: Any) -> dict[str, bytes]:
        rows, drafts, most = result
        indices = range(self.runner.input_batch.num_reqs)[rows] if isinstance(rows, slice) else rows.tolist()
        return {"result": repr((list(indices), drafts, most)).encode()}


def compare_decode_inputs(worker: Any) -> None:
    """From now on the inputs of decode steps are prepared in both ways."""
    worker.model_runner.input_comparison = InputComparison(worker.model_runner)


def plant_missed_writes(worker: Any) -> None:
    """From now on the fast path leaves out what it writes to one buffer, of those that vLLM writes: to the next one in
    every step."""
    from runner_buffers import Saved

    runner, comparison = worker.model_runner, worker.model_runner.input_comparison
    names, prepare = cycle(sorted(comparison.written)), worker.model_runner.decode_inputs.prepare
    comparison.reported = []

    def prepare_without_one(tokens: Any) -> Any:
        saved = Saved(runner)
        result = prepare(tokens)
        if result is not None:
            comparison.left_out.append(next(names))
            saved.restore(comparison.left_out[-1])
        return result

    runner.decode_inputs.prepare = prepare_without_one


def decode_inputs_compared(worker: Any) -> dict[str, Any]:
    """Returns what was compared so far; `reported` are the differing buffers of each step."""
    found = worker.model_runner.input_comparison
    return {
        "steps": found.steps,
        "buffers": sorted(found.found),
        "written": sorted(found.written),
        "reported": found.reported,
        "left_out": found.left_out,
    }


class MetadataComparison:
    """Counts what the cache of decode metadata makes and reuses, and compares what it reuses with what vLLM makes."""

    METHODS = ("mode", "slots", "attention")

    def __init__(self, cache: Any) -> None:
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in self.METHODS}
        self._latest: dict[str, dict[Any, Any]] = {name: {} for name in self.METHODS}
        for name in self.METHODS:
            vars(cache).pop(name, None)  # of an earlier comparison
            setattr(cache, name, partial(self._ask, name, getattr(cache, name)))

    def _ask(self, name: str, own: Any, make: Any, sizes: dict[str, Any]) -> Any:
        counts, latest, made = self.counts[name], self._latest[name], []
        numbers = tuple((part, value) for part, value in sizes.items() if value is None or isinstance(value, int))
        earlier = latest.get(numbers)
        before = _describe(earlier)
        result = own(lambda: made.append(make()) or made[-1], sizes)
        counts["asked"] += 1
        counts["made"] += len(made)
        if earlier is not None:
            counts["repeated"] += 1
            counts["reused"] += result is earlier
        else:
            counts["mixed up"] += any(result is other for other in latest.values())
        if not made:
            after = _describe(result)
            counts["rewritten"] += earlier is not None and after != before
            counts["differing"] += after != _describe(make())
        latest[numbers] = result
        return result


def _describe(value: Any) -> Any:
    """Returns numbers that are equal if the metadata is: of tensors also the place in memory."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.data_ptr(), tuple(value.shape), value.stride(), value.tolist()
    if isinstance(value, dict):
        return {name: _describe(one) for name, one in value.items()}
    if dataclasses.is_dataclass(value):
        return {field.name: _describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_describe(one) for one in value] if isinstance(value, (tuple, list)) else value


def compare_decode_metadata(worker: Any) -> None:
    """From now on the metadata that is reused for decode steps is compared. Counts begin at 0."""
    runner = worker.model_runner
    runner.metadata_comparison = MetadataComparison(runner.decode_metadata)


def decode_metadata_compared(worker: Any) -> dict[str, Any]:
    """Returns what was counted so far, the classes that build metadata, and the sizes of blocks that kernels see."""
    runner = worker.model_runner
    groups = [group for groups in runner.attn_groups for group in groups]
    return {
        **{name: dict(counts) for name, counts in runner.metadata_comparison.counts.items()},
        "builders": sorted({type(group.get_metadata_builder()).__name__ for group in groups}),
        "kernel_block_sizes": [group.kernel_block_size for group in groups],
    }


def make_another_input_batch(worker: Any) -> None:
    """The runner gets another batch with buffers of its own, as vLLM makes it when the KV cache is set up again."""
    runner, batch = worker.model_runner, worker.model_runner.input_batch
    runner._init_block_sizes = []
    runner.may_reinitialize_input_batch(runner.kv_cache_config)
    assert runner.input_batch is not batch


def make_another_kv_cache_config(worker: Any) -> None:
    """The runner gets an equal configuration of the KV cache, as vLLM copies it when the KV cache is set up again."""
    worker.model_runner.kv_cache_config = copy.deepcopy(worker.model_runner.kv_cache_config)


def plant_picture_ranges(worker: Any) -> None:
    """From now on vLLM takes the model for one that attends to pictures in both directions, which no model here is."""
    worker.model_runner.is_mm_prefix_lm = True
    make_another_kv_cache_config(worker)


def has_fast_path(worker: Any) -> bool:
    """Returns whether decode steps are prepared by runner/decode_inputs.py."""
    runner = worker.model_runner
    assert (runner.decode_inputs is None) == (runner.decode_metadata is None)
    return runner.decode_inputs is not None


def would_have_fast_path(worker: Any, config: str, field: str, value: Any) -> bool:
    """Returns the same for a runner whose configuration has another value in `field` when the model is loaded."""
    from vllm_backplane.runner.decode_inputs import DecodeInputs

    given = getattr(worker.model_runner, config)
    before = getattr(given, field)
    setattr(given, field, value)
    try:
        return DecodeInputs.create_if_supported(worker.model_runner) is not None
    finally:
        setattr(given, field, before)


def mapped_table(worker: Any) -> dict[str, Any]:
    """Of the mapping in which the embedding's blocks lie: what the system says, in KiB, once all of it is read, and how
    much of it was resident before."""
    import ctypes
    import mmap
    import os
    from itertools import takewhile
    from pathlib import Path

    table = worker.get_model().model.embed_tokens.blocks.data_ptr()
    found: dict[str, Any] = {"process": os.getpid()}
    for header in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = header.split()[0].partition("-")
        where = range(int(begin, 16), int(end, 16))
        if table in where:
            break
    found["path"] = header.split(maxsplit=5)[5]

    def counted() -> dict[str, int]:
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        next(line for line in lines if line.startswith(header.split()[0]))
        told = (line.partition(":") for line in lines)
        return {name: int(value.split()[0]) for name, _, value in takewhile(lambda line: line[2].endswith(" kB"), told)}

    found["before"] = counted()["Rss"]
    for address in range(where.start, where.stop, mmap.PAGESIZE):
        ctypes.c_ubyte.from_address(address).value  # noqa: B018  the page is read
    return found | counted()


def compiled_ngrams(_worker: Any) -> int:
    """How often the lookup of n-grams was compiled; 0 where none is used, or nothing is compiled."""
    import sys

    proposer = sys.modules.get("vllm.v1.spec_decode.ngram_proposer")
    return 0 if proposer is None else len(getattr(proposer.batch_propose_numba, "signatures", ()))


def operators(_worker: Any) -> dict[str, int]:
    """How many run in which way."""
    from vllm_backplane.ops import resolution

    return dict(Counter(line.implementation for line in resolution.frozen() or ()))


def driver_memory(worker: Any) -> dict[str, int]:
    """The simulated driver's counters of the worker's card, and the pages of the host behind it."""
    import torch

    from vllm_backplane.devices.sim.library import host_resident

    torch.bpnpu.synchronize()
    return {**torch.bpnpu.memory_stats(worker.card), "resident": host_resident(worker.card)}


def graphs(worker: Any) -> dict[str, int]:
    """How many decode steps were captured and replayed, by Backplane's count and by the simulated driver's."""
    import torch

    calls = getattr(worker.model_runner.model, "calls", ())
    counted = torch.bpnpu.launch_counters(worker.card)
    return {
        "captured": len(calls),
        "replays": getattr(calls, "replays", 0),
        "graph_launches": int(counted["graph_launches"]),
    }


def replays(worker: Any) -> dict[str, int]:
    """How many decode steps were captured, replayed and given up, on any device."""
    model = worker.model_runner.model
    calls = getattr(model, "calls", ())
    return {
        "captured": len(calls),
        "replays": getattr(calls, "replays", 0),
        "given_up": len(getattr(model, "eager", ())),
    }


class OverHttp:
    """Mixed into a server's worker by `--worker-extension-cls`; `/collective_rpc` calls methods alone."""

    def rpc_replays(self) -> dict[str, int]:
        return replays(self)

    def rpc_threads(self) -> dict[str, int]:
        import torch

        return {"threads": torch.get_num_threads()}

    def rpc_compiled_ngrams(self) -> int:
        return compiled_ngrams(self)

    def rpc_compare_decode_metadata(self) -> None:
        compare_decode_metadata(self)

    def rpc_decode_metadata(self) -> dict[str, Any]:
        return decode_metadata_compared(self)

    def rpc_weight_types(self) -> dict[str, int]:
        """How many elements of the model's weights are codes, and how many are not."""
        found = {"codes": 0, "others": 0}
        for parameter in self.get_model().parameters():  # type: ignore[attr-defined]
            found["others" if parameter.is_floating_point() else "codes"] += parameter.numel()
        return found


def suspend_graphs(worker: Any) -> None:
    """Steps are eager from now on."""
    worker.model_runner.model.suspended = True


def plant_stale_input(worker: Any) -> None:
    """From now on the model gets a copy of its token ids instead of the buffer that was captured."""
    forward = worker.model_runner._model_forward

    def with_copy(input_ids: Any = None, **others: Any) -> Any:
        return forward(input_ids=input_ids.clone(), **others)

    worker.model_runner._model_forward = with_copy


def missing_synchronisations(worker: Any) -> int:
    """How many the simulated driver has found."""
    from vllm_backplane.devices.sim.library import races_found

    return races_found()


def plant_unawaited_stream(worker: Any) -> None:
    """From now on the stream that copies sampled tokens to the host does not wait for the one that samples them."""
    import torch

    class Hasty(torch.bpnpu.Stream):
        def wait_stream(self, _other: Any) -> None:
            """The mistake."""

    worker.model_runner.async_output_copy_stream = Hasty()


def plant_unawaited_input(worker: Any) -> None:
    """From now on the token ids of replayed steps are filled in on a stream of their own, for which nobody waits."""
    import torch
    from vllm.forward_context import get_forward_context

    forward, side = worker.model_runner._model_forward, torch.bpnpu.Stream()

    def filled_beside(input_ids: Any = None, **others: Any) -> Any:
        if get_forward_context().cudagraph_runtime_mode.name == "FULL":
            side.wait_stream(torch.bpnpu.current_stream())
            with torch.bpnpu.stream(side):
                input_ids.copy_(input_ids.clone())
        return forward(input_ids=input_ids, **others)

    worker.model_runner._model_forward = filled_beside


def plant_unawaited_tokens(worker: Any) -> None:
    """From now on the host reads sampled tokens without waiting for the copy that brings them."""

    class Hasty:
        def record(self) -> None:
            """Nobody waits for it."""

        def synchronize(self) -> None:
            """The mistake."""

    worker.model_runner.transfer_event = Hasty()


def plant_failing_sleep(worker: Any) -> None:
    """The last worker cannot give its weights back, from now on and until it is asked again."""
    device = worker.accelerator
    if "release" in vars(device):
        del device.release
    elif worker.rank == worker.parallel_config.world_size - 1:
        release = device.release

        def refuse(tag: str, *others: Any) -> None:
            if tag == "weights":
                raise RuntimeError("no room for the weights")
            release(tag, *others)

        device.release = refuse


def resident(_worker: Any) -> int:
    """Bytes of memory that the worker's process has."""
    from vllm_backplane.device import host

    return host.own_resident_memory()


def damage_kept_blocks(worker: Any) -> int:
    """Changes every block in the memory of the second rank's KV tier; the first rank's stay as they are."""
    from vllm_backplane.kv_offload.registration import connector_of_worker

    if worker.rank != 1:
        return 0
    tier = connector_of_worker()
    assert tier is not None
    rows = tier.connector_worker.store._slots._rows
    rows[...] ^= 0xFF
    return len(rows)


def hooks(worker: Any) -> int:
    """How many are called in a step."""
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in worker.get_model().modules())
