"""Defines functions that tests call in the worker processes: vLLM's `collective_rpc` passes them the worker.

vLLM sends functions by name only if VLLM_ALLOW_INSECURE_SERIALIZATION is set, as engine.py does.
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

import numpy


def memory(worker: Any) -> dict[str, Any]:
    """Returns the memory of every card as the device counts it, and the memory of all tensors that Python can find."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    device = worker.backplane_device
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
        "kv_cache": worker._kv_cache_allocator.bytes,
    }


def parameters(worker: Any) -> dict[str, str]:
    """Returns a digest of each parameter."""
    import hashlib

    return {
        name: hashlib.sha256(parameter.detach().cpu().numpy().tobytes()).hexdigest()
        for name, parameter in worker.get_model().named_parameters()
    }


class InputComparison:
    """Prepares the inputs of decode steps in two ways, by runner/decode_inputs.py and by vLLM, and compares all buffers
    of the runner afterwards.

    Both ways start from the same contents. In buffers that vLLM does not read, the contents of the last step are
    inverted first, so that a missing write shows even if it would repeat the values of the step before.
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
        """Replaces the runner's own method, and returns the result of vLLM's method."""
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
    """Lets later decode steps prepare their inputs in both ways."""
    worker.model_runner.input_comparison = InputComparison(worker.model_runner)


def plant_missed_writes(worker: Any) -> None:
    """Lets the fast path skip its writes to one of the buffers that vLLM writes: to the next buffer in every step."""
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
    """Returns the results of the comparisons so far; `reported` has the differing buffers of each step."""
    found = worker.model_runner.input_comparison
    return {
        "steps": found.steps,
        "buffers": sorted(found.found),
        "written": sorted(found.written),
        "reported": found.reported,
        "left_out": found.left_out,
    }


class MetadataComparison:
    """Counts what the cache of decode metadata makes and reuses, and compares reused metadata with that of vLLM."""

    METHODS = ("mode", "slots", "attention")

    def __init__(self, cache: Any) -> None:
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in self.METHODS}
        self._latest: dict[str, dict[Any, Any]] = {name: {} for name in self.METHODS}
        for name in self.METHODS:
            vars(cache).pop(name, None)  # of an earlier comparison
            setattr(cache, name, partial(self._get_and_compare, name, getattr(cache, name)))

    def _get_and_compare(self, name: str, own: Any, make: Any, sizes: dict[str, Any]) -> Any:
        counts, latest, made = self.counts[name], self._latest[name], []
        numbers = tuple((part, value) for part, value in sizes.items() if value is None or isinstance(value, int))
        earlier = latest.get(numbers)
        before = _describe(earlier)
        result = own(lambda: made.append(make()) or made[-1], sizes)
        counts["requested"] += 1
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
    """Returns values that are equal if the metadata is equal; for tensors they include the address."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.data_ptr(), tuple(value.shape), value.stride(), value.tolist()
    if isinstance(value, dict):
        return {name: _describe(one) for name, one in value.items()}
    if dataclasses.is_dataclass(value):
        return {field.name: _describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_describe(one) for one in value] if isinstance(value, (tuple, list)) else value


def compare_decode_metadata(worker: Any) -> None:
    """Compares the metadata that later decode steps reuse. Counts begin at 0."""
    runner = worker.model_runner
    runner.metadata_comparison = MetadataComparison(runner.decode_metadata)


def decode_metadata_compared(worker: Any) -> dict[str, Any]:
    """Returns the counts so far, the classes that build metadata, and the block sizes of kernels."""
    runner = worker.model_runner
    groups = [group for groups in runner.attn_groups for group in groups]
    return {
        **{name: dict(counts) for name, counts in runner.metadata_comparison.counts.items()},
        "builders": sorted({type(group.get_metadata_builder()).__name__ for group in groups}),
        "kernel_block_sizes": [group.kernel_block_size for group in groups],
    }


def make_another_input_batch(worker: Any) -> None:
    """Gives the runner another input batch with its own buffers, as vLLM does when the KV cache is set up again."""
    runner, batch = worker.model_runner, worker.model_runner.input_batch
    runner._init_block_sizes = []
    runner.may_reinitialize_input_batch(runner.kv_cache_config)
    assert runner.input_batch is not batch


def make_another_kv_cache_config(worker: Any) -> None:
    """Gives the runner a copy of its KV cache configuration, as vLLM does when the KV cache is set up again."""
    worker.model_runner.kv_cache_config = copy.deepcopy(worker.model_runner.kv_cache_config)


def plant_picture_ranges(worker: Any) -> None:
    """Marks the model as one that attends to pictures in both directions, which no model here does."""
    worker.model_runner.is_mm_prefix_lm = True
    make_another_kv_cache_config(worker)


def has_fast_path(worker: Any) -> bool:
    """Returns whether decode steps are prepared by runner/decode_inputs.py."""
    runner = worker.model_runner
    assert (runner.decode_inputs is None) == (runner.decode_metadata is None)
    return runner.decode_inputs is not None


def would_have_fast_path(worker: Any, config: str, field: str, value: Any) -> bool:
    """Returns whether a runner with another value in `field` of its configuration would have the fast path."""
    from vllm_backplane.runner.decode_inputs import DecodeInputs

    given = getattr(worker.model_runner, config)
    before = getattr(given, field)
    setattr(given, field, value)
    try:
        return DecodeInputs.create_if_supported(worker.model_runner) is not None
    finally:
        setattr(given, field, before)


def mapped_table(worker: Any) -> dict[str, Any]:
    """Reads the whole mapping that holds the embedding's blocks. Returns its sizes in /proc/self/smaps afterwards,
    in KiB, and `before`, the size that was resident at first."""
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
        fields = (line.partition(":") for line in lines)
        sizes = takewhile(lambda field: field[2].endswith(" kB"), fields)
        return {name: int(value.split()[0]) for name, _, value in sizes}

    found["before"] = counted()["Rss"]
    for address in range(where.start, where.stop, mmap.PAGESIZE):
        ctypes.c_ubyte.from_address(address).value  # noqa: B018  the page is read
    return found | counted()


def compiled_ngrams(_worker: Any) -> int:
    """Returns how often the lookup of n-grams was compiled; 0 if it is not used or not compiled."""
    import sys

    proposer = sys.modules.get("vllm.v1.spec_decode.ngram_proposer")
    return 0 if proposer is None else len(getattr(proposer.batch_propose_numba, "signatures", ()))


def operators(_worker: Any) -> dict[str, int]:
    """Returns how many operators run as a kernel and how many as a reference."""
    from vllm_backplane.ops import resolution

    return dict(Counter(line.implementation for line in resolution.frozen() or ()))


def driver_memory(worker: Any) -> dict[str, int]:
    """Returns the simulated driver's counters of the worker's card, and the host memory that backs the card."""
    import torch

    from vllm_backplane.devices.sim.library import host_resident

    torch.bpnpu.synchronize()
    return {**torch.bpnpu.memory_stats(worker.card), "resident": host_resident(worker.card)}


def graphs(worker: Any) -> dict[str, int]:
    """Returns how many decode steps were captured and replayed, counted by Backplane and by the simulated driver."""
    import torch

    calls = getattr(worker.model_runner.model, "calls", ())
    counted = torch.bpnpu.launch_counters(worker.card)
    return {
        "captured": len(calls),
        "replays": getattr(calls, "replays", 0),
        "graph_launches": int(counted["graph_launches"]),
    }


def replays(worker: Any) -> dict[str, int]:
    """Returns how many decode steps were captured, replayed and given up, on any device."""
    model = worker.model_runner.model
    calls = getattr(model, "calls", ())
    return {
        "captured": len(calls),
        "replays": getattr(calls, "replays", 0),
        "given_up": len(getattr(model, "eager", ())),
    }


class OverHttp:
    """Adds methods to a server's worker by `--worker-extension-cls`, because `/collective_rpc` calls methods only."""

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
        """Returns how many elements of the model's weights are codes, and how many are not."""
        found = {"codes": 0, "others": 0}
        for parameter in self.get_model().parameters():  # type: ignore[attr-defined]
            found["others" if parameter.is_floating_point() else "codes"] += parameter.numel()
        return found


def suspend_graphs(worker: Any) -> None:
    """Lets later steps run eagerly."""
    worker.model_runner.model.suspended = True


def plant_stale_input(worker: Any) -> None:
    """Lets later steps pass the model a copy of its token ids instead of the buffer that was captured."""
    forward = worker.model_runner._model_forward

    def with_copy(input_ids: Any = None, **others: Any) -> Any:
        return forward(input_ids=input_ids.clone(), **others)

    worker.model_runner._model_forward = with_copy


def missing_synchronizations(worker: Any) -> int:
    """Returns how many missing synchronizations the simulated driver has found."""
    from vllm_backplane.devices.sim.library import races_found

    return races_found()


def plant_unawaited_stream(worker: Any) -> None:
    """Lets later steps copy sampled tokens to the host without waiting for the stream that samples them."""
    import torch

    class Hasty(torch.bpnpu.Stream):
        def wait_stream(self, _other: Any) -> None:
            """Does not wait, which is the planted error."""

    worker.model_runner.async_output_copy_stream = Hasty()


def plant_unawaited_input(worker: Any) -> None:
    """Lets later replayed steps fill in their token ids on another stream, without waiting for it."""
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
    """Lets the host read later sampled tokens without waiting for their copy."""

    class Hasty:
        def record(self) -> None:
            """Does nothing; no code waits for the event."""

        def synchronize(self) -> None:
            """Does not wait, which is the planted error."""

    worker.model_runner.transfer_event = Hasty()


def plant_failing_sleep(worker: Any) -> None:
    """Lets the last worker fail to release its weights. A second call removes the fault."""
    device = worker.backplane_device
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
    """Returns the resident memory of the worker's process, in bytes."""
    from vllm_backplane.host import host_memory

    return host_memory.own_resident_memory()


def damage_kept_blocks(worker: Any) -> int:
    """Changes every block in the memory of rank 1's KV offload, and returns their number; other ranks do nothing."""
    from vllm_backplane.kv_offload.connector import connector_of_worker

    if worker.rank != 1:
        return 0
    connector = connector_of_worker()
    assert connector is not None
    rows = connector.connector_worker.store._slots._rows
    rows[...] ^= 0xFF
    return len(rows)


def save_offloaded_blocks(worker: Any, file: str) -> None:
    """Writes the blocks in the store of KV offload to a file of NumPy arrays, which are named after the keys."""
    from vllm_backplane.kv_offload.connector import connector_of_worker

    connector = connector_of_worker()
    assert connector is not None
    store = connector.connector_worker.store
    numpy.savez(file, **{key.hex(): store.read(key).view(numpy.float32) for key in store._entries})


def load_weights(worker: Any, folder: str) -> None:
    """Replaces the weights by those of a checkpoint of the same model."""
    worker.reload_weights(weights_path=folder)


def use_file_transfer(worker: Any) -> None:
    """Gives the worker a transfer of weights whose messages name checkpoints. vLLM's own transfers need a GPU."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.model_executor.model_loader.reload import inplace

    class FileTransfer(WeightTransferEngine):
        """Loads each message completely, so that a step between two messages runs with the weights of the first."""

        update_info_cls = dict

        def init_transfer_engine(self, _init_info: Any) -> None:
            pass

        def start_weight_update(self) -> None:
            pass

        def receive_weights(self, update_info: Any) -> None:
            inplace.reload_weights(self.vllm_config, self.model, None, update_info["folder"], True)

        def finish_weight_update(self) -> None:
            pass

        def shutdown(self) -> None:
            pass

    # vLLM passes a wrapper, which does not set attributes of the worker.
    worker.worker.weight_transfer_engine = FileTransfer(
        WeightTransferConfig(), worker.vllm_config, worker.device, worker.model_runner.get_model()
    )


def hooks(worker: Any) -> int:
    """Returns how many hooks of modules are called in a step."""
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in worker.get_model().modules())
