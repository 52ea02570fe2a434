"""Loads models as a worker does, and prints the memory that each took: loading_memory.py SMALL MODEL QUANTIZATION ...

Each MODEL is loaded in a process that is forked after the imports, which therefore take their time only once. SMALL is
a small model of the same kind. It is loaded first, so that one-time allocations are not counted.

The program counts anonymous memory (RssAnon) about every millisecond. It does not count mapped pages of the
checkpoint's files: they belong to the page cache, and the system reclaims them on demand. The QUANTIZATION `shared`
loads both models with the load format `backplane_shared`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = os.sysconf("SC_PAGE_SIZE")


def own() -> int:
    """Returns the bytes of resident memory of this process that are not backed by a file."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * PAGE


def mappings() -> Iterator[tuple[tuple[int, int], str]]:
    """Yields the address range and the file name of each file mapping of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, file, *name = line.split(maxsplit=5)
        if file != "0":
            start, end = (int(text, 16) for text in addresses.split("-"))
            yield (start, end), "".join(name)


class Watch(threading.Thread):
    """Records the peak of the process's own memory until `over` is set."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = own()
        self.over = False

    def run(self) -> None:
        while not self.over:
            self.peak = max(self.peak, own())
            time.sleep(0.0005)


def load(small: str, model: str, quantization: str) -> dict[str, int]:
    """Loads both models; returns the bytes of the second one's weights, and the peak and the final growth of memory."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    from vllm_backplane.runtime import runtime

    def configured(path: str) -> Any:
        return EngineArgs(
            model=path,
            quantization=None if quantization in ("none", "shared") else quantization,
            load_format="backplane_shared" if quantization == "shared" else "auto",
            dtype="bfloat16",
            max_model_len=256,
            skip_tokenizer_init=True,
        ).create_engine_config()

    first, config = configured(small), configured(model)
    runtime().device.load_kernels()
    with set_current_vllm_config(first), tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        kept = [get_model(vllm_config=first)]  # so that imports and one-time allocations happen before the measurement
    if quantization != "shared":
        kept.clear()
    with set_current_vllm_config(config):
        gc.collect()
        before = own()
        watch = Watch()
        watch.start()
        loaded = get_model(vllm_config=config)
        gc.collect()
        after = own()
        watch.over = True
        watch.join()
    files = [place for place, name in mappings() if name.endswith(".gguf")]
    weights = {
        each.data_ptr(): each.nbytes
        for each in (*loaded.parameters(), *loaded.buffers())
        if not any(start <= each.data_ptr() < end for start, end in files)
    }
    return {"weights": sum(weights.values()), "peak": watch.peak - before, "after": after - before}


def main() -> None:
    given = sys.argv[1:]
    importlib.import_module("vllm.v1.worker.gpu_worker")
    registry = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda function: function()  # a new interpreter would import vLLM again
    for small, model, quantization in zip(given[::3], given[1::3], given[2::3], strict=True):
        process = os.fork()
        if process == 0:
            print(
                json.dumps({"model": model, "quantization": quantization, **load(small, model, quantization)}),
                flush=True,
            )
            os._exit(0)
        _process, status = os.waitpid(process, 0)
        if status:
            sys.exit(f"loading {model} ended with {status}")


if __name__ == "__main__":
    main()
