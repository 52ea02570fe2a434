"""What tests ask of a worker, in its own process: functions that vLLM's `collective_rpc` calls with the worker.

Functions travel by name, which vLLM does only with ASKING among the variables.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

ASKING = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


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


def compare_decode_inputs(worker: Any) -> None:
    """From now on inputs of decode steps are prepared twice, by runner/decode_inputs.py and by vLLM, and compared."""
    import numpy
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner = worker.model_runner
    runner.compared, runner.differing = 0, set()

    def buffers(count: int, result: Any) -> dict[str, Any]:
        names = ("input_ids", "query_pos", "req_indices", "num_scheduled_tokens", "discard_request_mask")
        found = {
            f"{name}, {side}": getattr(getattr(runner, name), side)[:count] for name in names for side in ("cpu", "gpu")
        }
        for name in ("query_start_loc", "num_accepted_tokens"):
            found |= {f"{name}, {side}": getattr(getattr(runner, name), side) for side in ("cpu", "gpu")}
        found |= {name: getattr(runner, name) for name in ("seq_lens", "optimistic_seq_lens_cpu")}
        found |= {name: getattr(runner, name)[:count] for name in ("positions", "num_computed_tokens")}
        found["prev_positions"] = runner.prev_positions.cpu[:count]
        tables = runner.input_batch.block_table.block_tables
        found |= {f"slots {place}": table.slot_mapping.gpu for place, table in enumerate(tables)}
        found |= {f"blocks {place}": table.block_table.gpu[:count] for place, table in enumerate(tables)}
        rows = numpy.arange(count)[result[0]] if isinstance(result[0], slice) else result[0]
        found |= {"rows": rows, "drafts": result[1] is None, "most": result[2]}
        return {name: numpy.array(value) for name, value in found.items()}

    def prepared(scheduler_output: Any, tokens: Any) -> Any:
        count = runner.input_batch.num_reqs
        ours = runner.decode_inputs.prepare(tokens)
        before = None if ours is None else buffers(count, ours)
        result = GPUModelRunner._prepare_inputs(runner, scheduler_output, tokens)
        if before is not None:
            after = buffers(count, result)
            runner.compared += 1
            runner.differing |= {name for name, value in before.items() if not numpy.array_equal(value, after[name])}
        return result

    runner._prepare_inputs = prepared


def compare_decode_metadata(worker: Any) -> None:
    """From now on what decode steps are told is made twice, by runner/decode_metadata.py and by vLLM, and compared."""
    import dataclasses

    import torch

    runner = worker.model_runner
    runner.told, runner.kept, runner.told_otherwise = 0, 0, set()

    def described(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.data_ptr(), tuple(value.shape), value.stride(), value.tolist()
        if isinstance(value, dict):
            return {name: described(one) for name, one in value.items()}
        if dataclasses.is_dataclass(value):
            return {field.name: described(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return [described(one) for one in value] if isinstance(value, (tuple, list)) else value

    def compared(name: str, own: Any) -> Any:
        def compare(make: Any, sizes: dict[str, Any]) -> Any:
            made: list[Any] = []
            ours = own(lambda: made.append(make()) or made[-1], sizes)
            runner.told += 1
            runner.kept += not made
            before = described(ours)
            if before != described(make()):
                runner.told_otherwise.add(name)
            return ours

        return compare

    for name in ("mode", "slots", "attention"):
        setattr(runner.decode_metadata, name, compared(name, getattr(runner.decode_metadata, name)))


def decode_metadata_compared(worker: Any) -> dict[str, Any]:
    runner = worker.model_runner
    return {"told": runner.told, "kept": runner.kept, "differing": sorted(runner.told_otherwise)}


def decode_inputs_compared(worker: Any) -> dict[str, Any]:
    return {"steps": worker.model_runner.compared, "differing": sorted(worker.model_runner.differing)}


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
    from collections import Counter

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

    def asked_for_replays(self) -> dict[str, int]:
        return replays(self)

    def asked_for_threads(self) -> dict[str, int]:
        import torch

        return {"threads": torch.get_num_threads()}

    def asked_for_compiled_ngrams(self) -> int:
        return compiled_ngrams(self)

    def asked_for_types(self) -> dict[str, int]:
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
