"""Measures time and memory of the auditor for a large plugin against two vLLMs.

    python benchmarks/audit.py                                     # 100,000 lines against the installed vLLM and 0.31.0
    python benchmarks/audit.py --lines 20000 --vllm installed

The plugin is generated: modules of about 400 lines with the imports, guards, patches, registrations and overrides that
plugins have, and ordinary code around them. Memory is the sum over all processes, sampled. The program exits with 1 if
the audit took longer than `MAX_SECONDS`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

MAX_SECONDS = 30
"""Time limit for 100,000 lines against two vLLMs on two cores."""

MODULES = (
    ("vllm.v1.core.sched.scheduler", "Scheduler"),
    ("vllm.v1.worker.gpu_worker", "Worker"),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
    ("vllm.v1.attention.backend", "AttentionBackend"),
    ("vllm.v1.engine.core", "EngineCore"),
    ("vllm.platforms", "Platform"),
    ("vllm.config", "VllmConfig"),
    ("vllm.model_executor.layers.layernorm", "RMSNorm"),
    ("vllm.model_executor.layers.linear", "RowParallelLinear"),
    ("vllm.distributed.parallel_state", "GroupCoordinator"),
    ("vllm.lora.layers", "BaseLayerWithLoRA"),
    ("vllm.v1.sample.sampler", "Sampler"),
    ("vllm.model_executor.models.llama", "LlamaForCausalLM"),
    ("vllm.model_executor.models.qwen2", "Qwen2ForCausalLM"),
    ("vllm.v1.spec_decode.eagle", "EagleProposer"),
    ("vllm.entrypoints.llm", "LLM"),
    ("vllm.nowhere.at_all", "Nothing"),
)

HEAD = """\
from __future__ import annotations

import os

import torch
import vllm
import vllm.envs as envs
from packaging.version import Version
from {module} import {name}
from vllm.logger import init_logger
from vllm.model_executor.custom_op import CustomOp

try:
    from vllm.utils.math_utils import cdiv
except ImportError:
    from vllm.utils import cdiv

logger = init_logger(__name__)

if Version(vllm.__version__) >= Version("0.32"):
    LIMIT = 3
else:
    from vllm.worker.worker import Worker as Old

{name}.method_{number} = None
if hasattr({name}, "forward"):
    {name}.forward = None


class Plug{name}{number}({name}):
    def shutdown(self):
        return super().shutdown()
"""

FUNCTION = '''

    def step_{number}(self, batch, lengths, *, scale: float = 1.0):
        """Adds up what a batch costs."""
        total = 0
        for index, length in enumerate(lengths):
            if length > {number} and index % 2:
                total += cdiv(length, 16) * scale
            elif batch is not None:
                total -= self.config.weight[index] + batch.rows[index].cost(length)
        values = {{key: value for key, value in self.table.items() if value is not None}}
        logger.debug("step %s took %s of %s", {number}, total, values)
        if os.environ.get("PLUG_TRACE_{number}"):
            torch.save([total, values], f"/tmp/{{total}}.pt")
        return total, [value + {number} for value in values.values()]
'''


def write_plugin(folder: Path, lines: int) -> int:
    """Writes about `lines` lines of Python below `folder`, and returns their number."""
    package = folder / "plug"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def register():\n    return 'plug.part_0.Plug'\n")
    written, number = 2, 0
    while written < lines:
        module, name = MODULES[number % len(MODULES)]
        text = HEAD.format(module=module, name=name, number=number)
        text += "".join(FUNCTION.format(number=index) for index in range(26))
        (package / f"part_{number}.py").write_text(text)
        written += text.count("\n")
        number += 1
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--vllm", nargs="+", default=["installed", "0.31.0"])
    parser.add_argument("--workers", default="2")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = write_plugin(Path(folder), args.lines)
        # The installed command and not this program: spawned worker processes import the main module again.
        command = [str(Path(sys.executable).with_name("vllm-patchbay")), "audit", folder, "--json"]
        command += ["--fail-on", "never", "--workers", args.workers, "--vllm", *args.vllm]
        result = Path(folder, "result.json")
        with result.open("w") as output:
            begun = time.monotonic()
            process = subprocess.Popen(command, stdout=output)
            peak = _watch(psutil.Process(process.pid), process)
            seconds = time.monotonic() - begun
        counts = json.loads(result.read_text())["counts"]
    print(f"{lines} lines, {len(args.vllm)} vLLMs, {args.workers} workers: {seconds:.1f} s, {peak / 2**20:.0f} MiB")
    print(f"findings: {counts}")
    if seconds > MAX_SECONDS:
        print(f"more than {MAX_SECONDS} s", file=sys.stderr)
    return process.returncode or int(seconds > MAX_SECONDS)


def _watch(root: psutil.Process, process: subprocess.Popen[bytes]) -> int:
    """Returns the largest amount of memory that the process and its children held at once."""
    peak = 0
    while process.poll() is None:
        held = 0
        try:
            for member in [root, *root.children(recursive=True)]:
                held += member.memory_info().rss
        except psutil.NoSuchProcess:
            pass
        peak = max(peak, held)
        time.sleep(0.05)
    return peak


if __name__ == "__main__":
    sys.exit(main())
