"""Tests the path of a GGUF file as vLLM's model argument: the resulting configuration, and refused combinations."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests import programs
from tests.environment import AT_START

pytestmark = pytest.mark.process

PROGRAM = """
import json, sys
import huggingface_hub.constants
huggingface_hub.constants.HF_HUB_OFFLINE = False  # vLLM would look for names in the cache, and for nothing else
from vllm.engine.arg_utils import EngineArgs

found = {}
for name, options in json.loads(sys.argv[1]).items():
    try:
        config = EngineArgs(skip_tokenizer_init=True, **options).create_engine_config()
    except Exception as fault:
        found[name] = f"{type(fault).__name__}: {fault}"
    else:
        found[name] = [
            config.load_config.load_format,
            config.model_config.quantization,
            config.model_config.served_model_name,
            config.model_config.architecture,
        ]
print(json.dumps(found))
"""


TAKEN = """
from vllm.model_executor.layers.quantization import get_quantization_config, register_quantization_config
from vllm.plugins import load_general_plugins

other = type("Other", (get_quantization_config("fp8"),), {})
register_quantization_config("gguf")(other)
load_general_plugins()
"""


def test_a_name_that_another_plugin_took_is_refused() -> None:
    done = programs.run(programs.command(TAKEN))
    assert done.returncode != 0
    assert "--quantization gguf already belongs to" in done.stderr and "uninstall one of the two" in done.stderr


def test_the_path_is_enough_and_contradictions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.ones((8, 32), np.float32))
    for norm in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{norm}.weight", np.ones(32, np.float32))
    for matrix in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{matrix}.weight", np.ones((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "damaged.gguf").write_bytes(path.read_bytes()[:-8])
    requests = {
        "plain": {"model": str(path)},
        "named": {"model": str(path), "served_model_name": "mine"},
        "other format": {"model": str(path), "load_format": "safetensors"},
        "other quantization": {"model": str(path), "quantization": "int8"},
        "of the hub": {"model": "org/model-GGUF:Q4_0"},
        "damaged": {"model": str(tmp_path / "damaged.gguf")},
    }
    variables = {**AT_START, "BACKPLANE_CACHE": str(tmp_path / "cache")}
    done = programs.run(programs.command(PROGRAM, json.dumps(requests)), env=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["plain"] == ["gguf", "gguf", str(path), "LlamaForCausalLM"]
    assert found["named"] == ["gguf", "gguf", "mine", "LlamaForCausalLM"]
    assert "cannot load weights from a GGUF file" in str(found["other format"])
    assert "quantized already (gguf)" in str(found["other quantization"])
    assert "'vllm-backplane model add org/model-GGUF:Q4_0'" in str(found["of the hub"])
    assert "CheckpointError" in found["damaged"] and "ends at byte" in found["damaged"]
