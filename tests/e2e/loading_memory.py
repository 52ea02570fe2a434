"""Loads a model as a worker does and says what memory it took: loading_memory.py MODEL QUANTIZATION DTYPE.

Counts memory of the process's own (RssAnon), every millisecond or so. Pages of the checkpoint's files that are mapped
are the system's cache: it takes them back when it needs them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


def own() -> int:
    """Resident memory that no file stands behind."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * PAGE


class Watch(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = own()
        self.over = False

    def run(self) -> None:
        while not self.over:
            self.peak = max(self.peak, own())
            time.sleep(0.0005)


def main() -> None:
    model, quantization, dtype = sys.argv[1:]
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.model_loader.utils import get_model_architecture

    from vllm_backplane.runtime import runtime

    arguments = EngineArgs(
        model=model,
        quantization=None if quantization == "none" else quantization,
        dtype=dtype,
        max_model_len=256,
        skip_tokenizer_init=True,
    )
    config = arguments.create_engine_config()
    get_model_architecture(config.model_config)  # imports the model, which takes memory of its own
    runtime().device.load_kernels()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        gc.collect()
        before = own()
        watch = Watch()
        watch.start()
        loaded = get_model(vllm_config=config)
        gc.collect()
        after = own()
        watch.over = True
        watch.join()
    weights = {
        each.data_ptr(): each.nbytes
        for each in (*loaded.parameters(), *loaded.buffers())
        # Rows of bytes are blocks of a GGUF file, where it is mapped; packed codes have four dimensions.
        if not (each.dtype == torch.uint8 and each.dim() == 2)
    }
    print(json.dumps({"weights": sum(weights.values()), "peak": watch.peak - before, "after": after - before}))


if __name__ == "__main__":
    main()
