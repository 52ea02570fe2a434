"""Tests that a server ends with a clear error if the plugin or its device cannot start, without any fallback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine import Result, job, try_engines
from processes import SCRIPTS, Child, on_path
from transformers import GptOssConfig, LlamaConfig, MambaConfig, PretrainedConfig

from tests.ports import free_port

pytestmark = [pytest.mark.server, pytest.mark.models]

LIMIT = 300
"""Seconds after which a server counts as hanging."""

VENDOR = """\
from vllm_backplane.device import Device, MemoryInfo, Probe

{top}


class Broken(Device):
    name = "broken"
    torch_type = "cpu"
    dispatch_key = "CPU"

    @classmethod
    def probe(cls):
        return Probe(available=True, count=1)

    def memory(self, index=0):
        return MemoryInfo(total=1 << 34, free=1 << 33)

    def {method}(self):
        raise OSError("driver 4.2 does not answer on slot 7")
"""
"""Source of a device that raises in a method, or when its module is imported."""


@dataclass(frozen=True)
class Case:
    """Describes a start that must fail."""

    expected: tuple[str, ...]
    """Texts that the output must contain."""
    variables: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    plain: bool = False
    """Whether the command is `vllm serve` instead of `vllm-backplane serve`."""
    vendor: Mapping[str, str] | None = None
    """Values for VENDOR, if the device is installed."""
    address_space: int | None = None
    """Limit of the address space in KiB (`ulimit -v`)."""


BROKEN = {"BACKPLANE_DEVICE": "broken"}
FAULT = "driver 4.2 does not answer on slot 7"

CASES = {
    "vLLM ignores plugins, vllm serve": Case(
        ("VLLM_TARGET_DEVICE", "Unset VLLM_TARGET_DEVICE"),
        {"VLLM_TARGET_DEVICE": "cpu", "BACKPLANE_DEVICE": "cpu"},
        plain=True,
    ),
    "vLLM ignores plugins, our command": Case(("unset VLLM_TARGET_DEVICE",), {"VLLM_TARGET_DEVICE": "cpu"}),
    "plugins switched off, our command": Case(("unset VLLM_PLUGINS",), {"VLLM_PLUGINS": ""}),
    "unknown device": Case(("nonsense", "Installed:", "cpu"), {"BACKPLANE_DEVICE": "nonsense"}),
    "unknown device, vllm serve": Case(("nonsense", "Installed:", "cpu"), {"BACKPLANE_DEVICE": "nonsense"}, plain=True),
    "device that cannot load": Case((FAULT,), BROKEN, vendor={"method": "load", "top": ""}),
    "device that cannot load, vllm serve": Case((FAULT,), BROKEN, plain=True, vendor={"method": "load", "top": ""}),
    "device whose kernels cannot load": Case((FAULT,), BROKEN, vendor={"method": "load_kernels", "top": ""}),
    "device whose module cannot be imported": Case(
        ("broken", "libvendor.so: cannot open"),
        BROKEN,
        vendor={"method": "load", "top": 'raise ImportError("libvendor.so: cannot open shared object file")'},
    ),
    "option of a device whose module cannot be imported": Case(
        ("BACKPLANE_BROKEN_MODE", "libvendor.so: cannot open"),
        {**BROKEN, "BACKPLANE_BROKEN_MODE": "fast"},
        vendor={"method": "load", "top": 'raise ImportError("libvendor.so: cannot open shared object file")'},
    ),
    "unknown option": Case(
        ("devise", "did you mean 'device'"),
        arguments=("--additional-config", '{"backplane": {"devise": "cpu"}}'),
    ),
    "unknown variable": Case(("BACKPLANE_DEVISE", "did you mean 'BACKPLANE_DEVICE'"), {"BACKPLANE_DEVISE": "cpu"}),
    "chat template that is endless with a variable": Case(
        ("the template of --chat-template takes more than 10 s", "change --default-chat-template-kwargs"),
        arguments=(
            "--chat-template",
            "{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}",
            "--default-chat-template-kwargs",
            '{"n": 99999}',
        ),
    ),
    "variable with a bad value": Case(
        ("BACKPLANE_MEMORY_SHARE", "a number above 0 and at most 1"), {"BACKPLANE_MEMORY_SHARE": "much"}
    ),
}

CASES |= {
    "ulimit -v is too low for vLLM": Case(
        ("ulimit -v limits each process to 0.95 GiB, and a server needs 3 GiB",), address_space=1_000_000
    ),
    "ulimit -v is too low for the KV cache": Case(
        (
            "a KV cache of 2.00 GiB was requested",
            "is free for it on cpu within ulimit -v",
            "lower --kv-cache",
        ),
        arguments=("--kv-cache-memory-bytes", str(2 << 30)),
        address_space=3_600_000,
    ),
}

SECOND_VARIANTS = ("unknown device, vllm serve",)
"""Cases of which `make test` runs another one with the same command, and one with the same fault."""

STATES = "draft tokens with a recurrent state that cannot be rolled back"
FP8, MXFP4 = "weights in fp8", "weights in mxfp4"
CONFIGURED: dict[str, PretrainedConfig] = {
    STATES: MambaConfig(architectures=["MambaForCausalLM"], num_hidden_layers=1, hidden_size=64),
    FP8: LlamaConfig(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=1,
        quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"},
    ),
    MXFP4: GptOssConfig(
        architectures=["GptOssForCausalLM"], num_hidden_layers=1, quantization_config={"quant_method": "mxfp4"}
    ),
}
"""Configurations of models that must be refused before weights are loaded, so no weights exist."""

ENGINES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    STATES: (
        {
            "skip_tokenizer_init": True,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2},
        },
        ("MambaForCausalLM carries a recurrent state", "remove --speculative-config"),
    ),
    FP8: ({"skip_tokenizer_init": True}, ("quantization fp8 (of the checkpoint", "choose a checkpoint of: GPTQ")),
    MXFP4: ({"skip_tokenizer_init": True}, ("mxfp4 (of the checkpoint", "choose a checkpoint of: GPTQ")),
    "section that is not quite ours": (
        {"additional_config": {"backplan": {"memory_share": 0.1}}},
        ("'backplan'", "did you mean 'backplane'"),
    ),
    "option with a bad value": (
        {"additional_config": {"backplane": {"memory_share": 7}}},
        ("memory_share", "a number above 0 and at most 1"),
    ),
    "option that comes too late": (
        {"additional_config": {"backplane": {"patch_drift": "warn"}}},
        ("BACKPLANE_PATCH_DRIFT",),
    ),
    "option for another device than the one chosen": (
        {"additional_config": {"backplane": {"device": "minimal"}}},
        ("BACKPLANE_DEVICE=minimal",),
    ),
    "group size of weights that are not quantized": (
        {"additional_config": {"backplane": {"quantization_group": 64}}},
        (
            "quantization_group is 64 (--additional-config",
            "add --quantization int8 or int4, or remove quantization_group",
        ),
    ),
    "two shares of the memory": (
        {"gpu_memory_utilization": 0.3, "additional_config": {"backplane": {"memory_share": 0.4}}},
        ("option memory_share is 0.4 and --gpu-memory-utilization is 0.3; remove one",),
    ),
    "folder of what sleeps": (
        {"enable_sleep_mode": True, "additional_config": {"backplane": {"cpu": {"sleep_folder": "/nowhere"}}}},
        ("/nowhere is not a folder", "give a folder on a disk"),
    ),
    "dual-batch overlap": ({"enable_dbo": True}, ("remove --enable-dbo",)),
    "type of the KV cache": ({"kv_cache_dtype": "nvfp4"}, ("as 'nvfp4'; choose --kv-cache-dtype among: auto, ",)),
    "compilation": ({"compilation_config": {"mode": 3}}, ("device 'cpu' runs models eagerly", "-cc.mode=none")),
    "graphs of another kind": (
        {"compilation_config": {"cudagraph_mode": "FULL"}},
        ("cudagraph_mode FULL is not supported", "use -cc.cudagraph_mode=full_decode_only"),
    ),
}
"""Engine arguments that must be refused, with parts of the error. CASES has one of them on the command line of a server
("unknown option")."""


def install_vendor(folder: Path, filling: Mapping[str, str]) -> None:
    """Writes the distribution of the device as pip would install it: a module and its metadata."""
    (folder / "broken_device.py").write_text(VENDOR.format(**filling))
    metadata = folder / "broken_device-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-device\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[vllm_backplane.devices]\nbroken = broken_device:Broken\n")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.exhaustive] if name in SECOND_VARIANTS else [])
        for name, case in CASES.items()
    ],
)
def test_it_ends_and_reports_why(case: Case, tiny_llama: Path, tmp_path: Path) -> None:
    variables: dict[str, str | None] = dict(case.variables)
    if case.vendor is not None:
        folder = tmp_path / "site"
        folder.mkdir()
        install_vendor(folder, case.vendor)
        variables["PYTHONPATH"] = on_path(folder)
    command = [str(SCRIPTS / ("vllm" if case.plain else "vllm-backplane")), "serve", str(tiny_llama)]
    limits = [
        "--host",
        "127.0.0.1",
        "--port",
        str(free_port()),
        "--max-model-len",
        "256",
        "--max-num-seqs",
        "4",
    ]
    given = [*command, *limits, *case.arguments]
    if case.address_space is not None:
        given = ["bash", "-c", f'ulimit -v {case.address_space} && exec "$@"', "bash", *given]
    # `vllm serve` starts in a new interpreter, as for a user in a shell.
    with Child(given, tmp_path / "server.log", variables, warm=not case.plain and case.address_space is None) as child:
        status = child.wait(LIMIT)
        output = child.text()
        assert status != 0, "the exit status must report the failure"
        missing = [text for text in case.expected if text not in output]
        assert not missing, f"the output does not contain {missing}"
        assert "Application startup complete" not in output
        assert not child.wait_for_nothing_left(60)


@pytest.fixture(scope="module")
def refused(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Returns the result of each engine. One process starts them all."""
    folder = tmp_path_factory.mktemp("refused")
    for name, config in CONFIGURED.items():
        config.save_pretrained(folder / name)
    jobs = [job(folder / name if name in CONFIGURED else tiny_llama, **given) for name, (given, _) in ENGINES.items()]
    results, _ = try_engines(folder, jobs, {"BACKPLANE_DEVICE": None})  # the device is the default one
    return dict(zip(ENGINES, results, strict=True))


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_does_not_start_and_reports_why(refused: dict[str, Result], name: str) -> None:
    assert "error" in refused[name], "the engine must not start"
    missing = [text for text in ENGINES[name][1] if text not in refused[name]["error"]]
    assert not missing, f"the error does not contain {missing}: {refused[name]['error']}"
    assert refused[name]["left"] == []
