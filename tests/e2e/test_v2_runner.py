"""Tests vLLM's V2 model runner, which needs Triton, in Backplane's worker: the tokens equal those of transformers.

No shipped device has Triton, so this test replaces its compiler by Triton's interpreter. The interpreter computes each
program of a kernel with numpy in host memory, which is slow but correct.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
from engine import batch, greedy, job, run_engines
from processes import environment, on_path

pytestmark = [pytest.mark.server, pytest.mark.models, pytest.mark.download]

TRITON = "triton==3.9.0"
TOKENS = 8
PROMPTS = [[7, 300, 21, 9000, 44], list(range(1000, 1090)), [40000]]
"""Prompts of the test. The second one has two prefill chunks, and its output continues in another KV block."""
DRAWN = {"temperature": 0.9, "seed": 3, "max_tokens": 4, "ignore_eos": True, "detokenize": False, "logprobs": 0}
DEVICE = """
from dataclasses import replace

from vllm_backplane.devices.cpu import CpuDevice


class Interpreted(CpuDevice):
    name = "interpreted"
    capabilities = replace(CpuDevice.capabilities, triton=True, fork=False)

    def load_kernels(self):
        super().load_kernels()
        # vLLM's kernel loops over rows, which are integers of Python in Triton's interpreter and tensors elsewhere.
        from vllm.v1.sample.ops import topk_topp_sampler
        from vllm.v1.worker.gpu.sample import sampler

        def apply_top_k_top_p(logits, k, p, **_):
            return topk_topp_sampler.apply_top_k_top_p_pytorch(logits, k, p)

        sampler.apply_top_k_top_p = apply_top_k_top_p
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Installs Triton and a device that supports it into a folder, and returns the folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--only-binary=:all:", "--no-compile", "--target", str(folder), TRITON],
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "interpreted_device.py").write_text(DEVICE)
    metadata = folder / "interpreted_device-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: interpreted-device\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm_backplane.devices]\ninterpreted = interpreted_device:Interpreted\n"
    )
    yield folder
    shutil.rmtree(folder)  # a gigabyte


def test_the_v2_model_runner_gives_the_tokens_of_transformers(site: Path, tiny_llama: Path, tmp_path: Path) -> None:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 64 << 20}
    work = job(tiny_llama, batch(PROMPTS, greedy(TOKENS, logprobs=0)), batch(PROMPTS[:1], DRAWN), **limits)
    variables = {
        "PYTHONPATH": on_path(site),
        "BACKPLANE_DEVICE": "interpreted",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",  # otherwise vLLM requires a driver of Triton
    }
    (second,) = run_engines(tmp_path, [work], variables, device="interpreted")
    assert second["runner"] == "V2"
    model = reference.load(tiny_llama)
    for ids, output in zip(PROMPTS, second["batches"][0], strict=True):
        expected = reference.continue_without_cache(model, ids, TOKENS)
        assert expected.smallest_margin > 1e-3, "near a tie; change the prompts"
        assert output["token_ids"] == expected.token_ids
        assert output["logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)
    # Another random generator samples other tokens, so only their number and log-probabilities are checked.
    [drawn] = second["batches"][1]
    assert len(drawn["token_ids"]) == 4
    assert all(logprob <= 0 for logprob in drawn["logprobs"])
