"""Writes the sound inputs of the corpora, and hostile ones with a depth or a number that changes rarely reach.

Inputs that once broke a rule were added to the corpora later, by name.

python -m tests.fuzz.seeds
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save

from tests import scheme_checkpoints as schemes
from tests.fuzz.targets import framed
from tests.fuzz.targets.schemes import INPUTS, OUTPUTS, WIDTH
from tests.gguf_bytes import ARRAY, BOOL, F32_VALUE, STRING, U8, U32, U64, File, array, f32, key, text, u32, u64
from tests.valid_gguf_models import MODELS, TOKENIZER, mutated_model, single_changes
from vllm_backplane.kv_offload import blocks_protocol
from vllm_backplane.kv_offload.block_keys import KEY_BYTES
from vllm_backplane.weights import weights_protocol
from vllm_backplane.weights.weights_protocol import Manifest, TensorEntry

CORPUS = Path(__file__).parent / "corpus"


def gguf_files() -> dict[str, bytes]:
    """Returns small files with every kind of metadata."""
    numbers = [key(f"n.{kind}", kind, value) for kind, value in ((U8, b"\x07"), (U32, u32(7)), (U64, u64(7)))]
    others = [key("n.f", F32_VALUE, f32(0.5)), key("n.b", BOOL, b"\x01"), key("n.s", STRING, text("é"))]
    return {
        "small": File().build(),
        "values": File(keys=[*numbers, *others]).build(),
        "strings": File(keys=[key("a", ARRAY, array(STRING, 16, text("b") * 16))]).build(),
        "arrays in arrays": File(keys=[key("a", ARRAY, array(ARRAY, 2, array(ARRAY, 0, b"") * 2))]).build(),
        "nothing": File(keys=[], tensors=[], data=b"").build(),
    }


def gguf_tokenizers() -> dict[str, bytes]:
    """Returns metadata of tokenizers."""
    plain = {name.removeprefix("tokenizer."): value for name, value in TOKENIZER.items()}
    tokens = ["<unk>", "<s>", "</s>", "▁a", "b", "▁b", "a", "▁"]
    pieces = {
        **plain,
        "ggml.model": "llama",
        "ggml.tokens": tokens[:4],
        "ggml.token_type": [2, 3, 3, 1],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
    }
    return {
        "byte pairs": framed.dumps(plain),
        "pieces": framed.dumps(pieces),
        "template": framed.dumps({**plain, "chat_template": "{{ messages[0].content }}"}),
    }


def layers() -> dict[str, bytes]:
    """Returns a layer of each quantization scheme."""
    found = {
        "gptq": ({**schemes.GPTQ, "group_size": 32}, schemes.gptq(INPUTS, OUTPUTS, 4, 32)),
        "gptq, dynamic": (
            {**schemes.GPTQ, "bits": 8, "group_size": 32, "dynamic": {"+:.*down.*": {"bits": 4}}},
            schemes.gptq(INPUTS, OUTPUTS, 4, 32),
        ),
        "gptq, order": (
            {**schemes.GPTQ, "desc_act": True, "sym": False, "group_size": 32},
            schemes.gptq(INPUTS, OUTPUTS, 4, 32, symmetric=False, by_activation=3),
        ),
        "awq": ({**schemes.AWQ, "group_size": 32}, schemes.awq(INPUTS, OUTPUTS, 4, 32)),
        "w4a16": (schemes.compressed(4, 32), schemes.pack_quantized(INPUTS, OUTPUTS, 4, 32)),
        "w8a8": (schemes.compressed_int8(), schemes.int_quantized(INPUTS, OUTPUTS)),
    }
    return {name: framed.join(framed.dumps(config), save(layer.tensors)) for name, (config, layer) in found.items()}


def experts() -> dict[str, bytes]:
    """Returns an expert of each quantization scheme."""
    makers: dict[str, tuple[dict[str, object], Callable[[int, int], schemes.Stored]]] = {
        "gptq": ({**schemes.GPTQ, "group_size": 32}, lambda i, o: schemes.gptq(i, o, 4, 32)),
        "gptq, order": (
            {**schemes.GPTQ, "desc_act": True, "sym": False, "group_size": 32},
            lambda i, o: schemes.gptq(i, o, 4, 32, symmetric=False, by_activation=3),
        ),
        "awq": ({**schemes.AWQ, "group_size": 32}, lambda i, o: schemes.awq(i, o, 4, 32)),
        "w4a16": (schemes.compressed(4, 32), lambda i, o: schemes.pack_quantized(i, o, 4, 32)),
        "w8a8": (schemes.compressed_int8(), lambda i, o: schemes.int_quantized(i, o)),
    }
    sizes = {"w1": (INPUTS, WIDTH), "w2": (WIDTH, INPUTS), "w3": (INPUTS, WIDTH)}
    found = {}
    for name, (config, make) in makers.items():
        tensors = {
            f"{weight}.{part}": tensor for weight, size in sizes.items() for part, tensor in make(*size).tensors.items()
        }
        found[name] = framed.join(framed.dumps(config), save(tensors))
    return found


def adapters() -> dict[str, bytes]:
    """Returns adapters of two layers."""
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "target_modules": ["q_proj", "v_proj"]}
    tensors = {
        f"base_model.model.model.layers.0.self_attn.{module}.lora_{factor}.weight": torch.ones(shape)
        for module in ("q_proj", "v_proj")
        for factor, shape in (("A", (8, 16)), ("B", (16, 8)))
    }
    described = {**config, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {r"layers\.\d+": 4}, "use_rslora": True}
    return {
        "plain": framed.join(framed.dumps(config), save(tensors)),
        "patterns": framed.join(framed.dumps(described), save(tensors)),
    }


def messages() -> dict[str, dict[str, bytes]]:
    """Returns messages between servers, by target."""
    entries = (
        TensorEntry("model.a.weight", "torch.float32", (2, 3), "00" * 32),
        TensorEntry("b", "torch.int8", (), "1"),
    )
    manifest = Manifest({"model": "x", "rank": 0}, entries, {"model.scale": 0.5}).encode()
    header = struct.Struct("!20sB32sI")
    requests = {
        "describe": header.pack(weights_protocol.MAGIC, 1, bytes(32), 0),
        "get": header.pack(weights_protocol.MAGIC, 2, bytes(range(32)), 3),
    }
    start = struct.pack(f"!{len(blocks_protocol.MAGIC)}sB32sI", blocks_protocol.MAGIC, 1, bytes(range(32)), 2)
    block = b"\1" + bytes(16) + bytes(range(64))
    return {
        "weights-request": requests,
        "weights-manifest": {"small": struct.pack("!I", len(manifest)) + manifest},
        "weights-manifest-text": {"small": manifest},
        "blocks-request": {"two keys": start + bytes(2 * KEY_BYTES)},
        "blocks-answer": {"blocks": b"\0" + block + b"\0" + block, "other model": b"\1"},
    }


DEEP = b"[" * 16384
HUGE = 10**400
"""A number that JSON allows, and no float can hold."""


def hostile() -> dict[str, dict[str, bytes]]:
    """Returns inputs that are too deep, too many or too large, by target."""
    length = struct.Struct("!I").pack
    many: dict[str, object] = {"description": {}, "tensors": [["a", "b", [0] * 8, "c"]] * 512, "numbers": {}}
    (config, tensors), (adapter, factors) = (framed.split(made) for made in (layers()["gptq"], adapters()["plain"]))
    described, adapted = json.loads(config), json.loads(adapter)
    endless = (1 << 62).to_bytes(8, "little") + b"{}"
    repeated = json.dumps({f"{number}": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]} for number in range(256)})
    overlapping = len(repeated).to_bytes(8, "little") + repeated.encode() + bytes(4)

    def layer(**changes: object) -> bytes:
        return framed.join(framed.dumps({**described, **changes}), tensors)

    def adapter_with(**changes: object) -> bytes:
        return framed.join(framed.dumps({**adapted, **changes}), factors)

    return {
        "weights-manifest": {"deep": length(len(DEEP)) + DEEP, "four gigabytes": length((1 << 32) - 1) + b"{}"},
        "weights-manifest-text": {
            "deep": DEEP,
            "deep entry": framed.dumps({**many, "tensors": [["a", "b", [json.loads("[" * 900 + "]" * 900)], "c"]]}),
            "same tensor": framed.dumps(many),
            "huge size": framed.dumps({**many, "tensors": [["a", "b", [HUGE], "c"]]}),
        },
        "quantized-layer": {
            "deep": framed.join(DEEP, tensors),
            "many rules": layer(dynamic={f"+:{number}": {} for number in range(512)}),
            "huge group": layer(group_size=HUGE),
            "endless header": framed.join(config, endless),
            "overlapping tensors": framed.join(config, overlapping),
        },
        "adapter": {
            "deep": framed.join(DEEP, factors),
            "many patterns": adapter_with(rank_pattern={f"layers.{number}": 8 for number in range(501)}),
            "huge rank": adapter_with(r=HUGE),
            "huge alpha": adapter_with(lora_alpha=HUGE),
            "alpha of a pattern is text": adapter_with(alpha_pattern={"q_proj": "16"}),
            "modules to save are a number": adapter_with(modules_to_save=5),
            "endless header": framed.join(adapter, endless),
            "overlapping tensors": framed.join(adapter, overlapping),
        },
    }


def write() -> None:
    """Writes all inputs."""
    models = {f"{number} {name}": bytes([number]) for number, name in enumerate(MODELS)}
    # A check is reached only if all checks before it pass, so each change is an input.
    one_change = {f"change {orders.hex()}": orders for orders in single_changes()[::12]}
    assert all(mutated_model(orders) for orders in (*models.values(), *one_change.values()))
    found: dict[str, dict[str, bytes]] = {
        "gguf-header": {"small": gguf_files()["small"]},
        "gguf-file": gguf_files(),
        "gguf-model": {**models, **one_change},
        "gguf-tokenizer": gguf_tokenizers(),
        "quantized-layer": layers(),
        "quantized-experts": experts(),
        "adapter": adapters(),
        **messages(),
    }
    for target, inputs in hostile().items():
        found[target] = {**found[target], **{f"hostile {name}": data for name, data in inputs.items()}}
    for target, inputs in found.items():
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        for name, data in inputs.items():
            (CORPUS / target / name.replace(" ", "-").replace(",", "")).write_bytes(data)
    print(json.dumps({target: len(inputs) for target, inputs in found.items()}))


if __name__ == "__main__":
    write()
