"""Checks before vLLM is imported refuse what cannot work, and leave the rest to vLLM."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import gguf_bytes
from tests.ports import free_port
from vllm_backplane.device import discover
from vllm_backplane.devices import ON_HOST_MEMORY
from vllm_backplane.early_checks import address, backplane_options, check_request, memory
from vllm_backplane.early_checks.config_file import arguments_of, split_config
from vllm_backplane.early_checks.model import check_model
from vllm_backplane.early_checks.vllm_options import Given
from vllm_backplane.errors import UsageError
from vllm_backplane.host import host_memory

PREPARED = ("smollm2", "minilm")


def checked(model: str | None, *arguments: str, port: int = 0, device: str | None = None, **environment: str) -> None:
    check_request(
        model,
        arguments,
        prepared=PREPARED,
        address=("127.0.0.1", port or free_port()),
        device=device,
        environment=environment,
    )


def model_of(folder: Path, files: Mapping[str, bytes | str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def safetensors(path: Path, tensors: Mapping[str, tuple[str, Sequence[int], int]]) -> None:
    """Writes the header of a file, whose data is a hole."""
    offset, header = 0, {}
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps({"__metadata__": {}, **header}).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)


class TestModel:
    @pytest.mark.parametrize("name", ["s3://bucket/model", "gs://x/y", "runai:model", "azure://a/b/c"])
    def test_storage_of_other_kinds_is_left_to_vllm(self, name: str) -> None:
        check_model(name, Given(), PREPARED)

    def test_a_loader_of_another_kind_reads_names_of_its_own(self) -> None:
        check_model("./nothing", Given({"load_format": "runai_streamer"}), PREPARED)

    @pytest.mark.parametrize(
        "files",
        [
            {"config.json": "{}", "model.safetensors": "x" * 2000},
            {"config.json": "{}", "pytorch_model.bin": "x"},
            {"params.json": "{}", "consolidated.safetensors": "x" * 2000},
            {"model.gguf": "GGUF"},
            {"config.json": "{}", "unet/model.safetensors": "x" * 2000},
        ],
        ids=lambda files: " ".join(files),
    )
    def test_a_folder_that_may_be_a_model_passes(self, tmp_path: Path, files: dict[str, str]) -> None:
        check_model(str(model_of(tmp_path, files)), Given(), PREPARED)

    def test_weights_and_configuration_may_be_elsewhere(self, tmp_path: Path) -> None:
        folder = str(model_of(tmp_path / "a", {"config.json": "{}"}))
        check_model(folder, Given({"load_format": "dummy"}), PREPARED)
        folder = str(model_of(tmp_path / "b", {"model.safetensors": "x" * 2000}))
        check_model(folder, Given({"hf_config_path": "/elsewhere"}), PREPARED)

    def test_a_link_to_a_file_that_is_gone_is_reported(self, tmp_path: Path) -> None:
        model_of(tmp_path, {"config.json": "{}"})
        (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
        with pytest.raises(UsageError, match="is a link to a file that does not exist"):
            check_model(str(tmp_path), Given(), PREPARED)
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        with pytest.raises(UsageError, match=r"is a link to .*nowhere, which does not exist"):
            check_model(str(tmp_path / "link"), Given(), PREPARED)

    def test_a_name_that_no_path_can_have_is_reported(self) -> None:
        with pytest.raises(UsageError, match="cannot be a model: File name too long; give a path or a name"):
            check_model("x" * 5000, Given(), PREPARED)

    def test_a_socket_is_no_model(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("here")
            with pytest.raises(UsageError, match="neither a folder nor a file"):
                check_model("here", Given(), PREPARED)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_a_folder_that_may_not_be_read_is_reported(self, tmp_path: Path) -> None:
        (tmp_path / "closed").mkdir(mode=0)
        with pytest.raises(UsageError, match="cannot be read: Permission denied"):
            check_model(str(tmp_path / "closed"), Given(), PREPARED)

    def test_a_name_in_the_cache_of_the_hub_needs_no_network(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(UsageError, match="not in the cache of the hub"):
            check_model("user/model", Given(), PREPARED)
        model_of(tmp_path / "hub" / "models--user--model" / "snapshots" / "1", {"config.json": "{}"})
        check_model("user/model", Given(), PREPARED)
        model_of(tmp_path / "more" / "models--user--other" / "snapshots" / "1", {"config.json": "{}"})
        check_model("user/other", Given({"download_dir": str(tmp_path / "more")}), PREPARED)

    def test_another_hub_is_left_to_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
        check_model("user/model", Given(), PREPARED)


class TestMemory:
    """The memory of the machine is set, so that small files exceed it."""

    @pytest.fixture(autouse=True)
    def _small_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory, "_total_memory", lambda: (4 << 20, "this machine has"))

    @staticmethod
    def refused(model: Path, device: str | None = "cpu", **options: Any) -> bool:
        try:
            memory.check_fits(model, Given(options), device, {"cpu", "sim"})
        except UsageError as fault:
            return "this machine has 0.0 GiB; choose a smaller model" in str(fault)
        return False

    def test_weights_count_in_the_dtype_of_the_model(self, tmp_path: Path) -> None:
        millions = {"weight": ("F32", (3 << 10, 1 << 9), 6 << 20)}  # 1.5 million weights: 3 MiB in bfloat16
        safetensors(tmp_path / "model.safetensors", millions)
        assert not self.refused(tmp_path)
        assert not self.refused(tmp_path, dtype="bfloat16")
        assert self.refused(tmp_path, dtype="float32")
        assert not self.refused(tmp_path, dtype="float32", quantization="int8")

    def test_quantized_weights_count_as_they_are(self, tmp_path: Path) -> None:
        safetensors(tmp_path / "model.safetensors", {"weight": ("I32", (5 << 18,), 5 << 20)})
        assert self.refused(tmp_path)

    def test_shards_count_together_and_copies_once(self, tmp_path: Path) -> None:
        shard = {"weight": ("BF16", (3 << 20 >> 1,), 3 << 20)}
        for name in ("model-1.safetensors", "consolidated.safetensors"):
            safetensors(tmp_path / name, shard)
        assert not self.refused(tmp_path)
        safetensors(tmp_path / "model-2.safetensors", shard)
        assert self.refused(tmp_path)
        (tmp_path / memory.INDEX).write_text(json.dumps({"weight_map": {"weight": "model-2.safetensors"}}))
        assert not self.refused(tmp_path)

    def test_only_what_is_certain_is_refused(self, tmp_path: Path) -> None:
        safetensors(tmp_path / "model.safetensors", {"weight": ("BF16", (5 << 20,), 10 << 20)})
        assert self.refused(tmp_path) and self.refused(tmp_path, "sim") and self.refused(tmp_path, None)
        assert not self.refused(tmp_path, "vendor")
        assert not self.refused(tmp_path, nnodes="2")
        assert not self.refused(tmp_path, distributed_executor_backend="ray")
        memory.check_fits(tmp_path, Given(), None, {"cpu", "vendor"})
        (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
        assert not self.refused(tmp_path)

    def test_a_gguf_file_counts_without_its_embedding(self, tmp_path: Path) -> None:
        for name, refused in (("blk.0.attn_q.weight", True), ("token_embd.weight", False)):
            rows = 5 << 13
            file = gguf_bytes.File(
                tensors=[gguf_bytes.tensor(name, [256, rows], gguf_bytes.Q4_0, 0)], data=bytes(256 * rows // 32 * 18)
            )
            path = tmp_path / "model.gguf"
            path.write_bytes(file.build())
            assert self.refused(path) is refused


def test_the_memory_of_the_machine_is_that_of_the_device() -> None:
    total, words = memory._total_memory()
    assert total == host_memory.usable_memory().total
    assert words in ("this machine has", "a control group limits memory to")


def test_the_devices_on_host_memory_are_installed() -> None:
    assert discover().keys() >= ON_HOST_MEMORY


class TestAddress:
    def test_a_free_port_passes_and_stays_free(self) -> None:
        port = free_port()
        address.require_free("127.0.0.1", port)
        address.require_free("", port)
        address.require_free("localhost", port)

    def test_a_port_may_be_shared_by_the_servers_of_one_start(self) -> None:
        with socket.socket() as first:
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            first.bind(("127.0.0.1", free_port()))
            first.listen()
            place = first.getsockname()
            address.require_free(*place, shared=True)
            with pytest.raises(UsageError, match=f"in use by process {os.getpid()} "):
                address.require_free(*place)

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            (OSError(errno.EADDRINUSE, "in use"), "in use by a process of another user"),
            (OSError(errno.EACCES, "denied"), "needs the privileges of root; choose a port of 1024 or more"),
            (OSError(errno.EADDRNOTAVAIL, "no"), "is not an address of this machine"),
            (socket.gaierror(-2, "Name or service not known"), "is not an address or a known name"),
            (OSError(errno.ENOBUFS, "no memory"), "cannot listen on port 1 of host: no memory"),
        ],
    )
    def test_the_reason_is_stated(self, fault: OSError, message: str) -> None:
        assert message in address._explanation(fault, "host", 1)

    @pytest.mark.parametrize(
        ("words", "shown"),
        [
            (["/usr/bin/python3.11", "/opt/bin/vllm-backplane", "serve", "x"], "vllm-backplane serve x"),
            (["python", "-m", "http.server"], "python -m http.server"),
            (["VLLM::APIServer"], "VLLM::APIServer"),
            ([], ""),
            (["nginx", "x" * 80], "nginx " + "x" * 53 + "…"),
        ],
    )
    def test_the_owner_is_shown_by_its_command(self, words: list[str], shown: str) -> None:
        assert address._shortened(words) == shown

    def test_a_server_without_a_port_needs_none(self) -> None:
        with socket.create_server(("127.0.0.1", free_port())) as used:
            port = used.getsockname()[1]
            for arguments in (["--uds", "/tmp/socket"], ["--headless"]):
                checked("smollm2", *arguments, port=port)
            with pytest.raises(UsageError, match="is in use by process"):
                checked("smollm2", port=port)


class TestConfigFile:
    def test_its_values_become_arguments(self, tmp_path: Path) -> None:
        file = tmp_path / "a.yaml"
        file.write_text(
            "model: smollm2\nmax-model-len: 2k\nenforce-eager: true\nenable-lora: false\nno-such: false\n"
            "served-model-name: [a, b]\nspeculative-config:\n  method: ngram\nmiddleware: []\n"
        )
        assert arguments_of(file, {"--no-enable-lora"}) == [
            *("--model", "smollm2", "--max-model-len", "2k", "--enforce-eager", "--no-enable-lora"),
            *("--served-model-name", "a", "b", "--speculative-config", '{"method": "ngram"}'),
        ]
        assert split_config(["--a", "--config", "x.yml", "b"]) == (Path("x.yml"), ["--a", "b"])

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("- a", "has no options; write one per line"),
            ("a: [", "line 1, column 5: this is not YAML"),
            (b"\xff", "is not a text in UTF-8"),
            (None, "cannot be read: No such file or directory"),
        ],
    )
    def test_a_file_that_cannot_be_used_is_reported(
        self, tmp_path: Path, content: str | bytes | None, message: str
    ) -> None:
        if content is not None:
            model_of(tmp_path, {"a.yaml": content})
        with pytest.raises(UsageError, match=message):
            checked(None, "--config", str(tmp_path / "a.yaml"))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--config"], "the path of a YAML file is missing"),
            (["--config", "a.yaml", "--config", "b.yaml"], "given twice"),
            (["--config", "a.json"], r"give the path of a YAML file \(\.yaml or \.yml\)"),
        ],
    )
    def test_one_yaml_file_is_needed(self, arguments: list[str], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            checked("smollm2", *arguments)

    def test_it_names_the_model_if_the_command_line_does_not(self, tmp_path: Path) -> None:
        file = tmp_path / "a.yaml"
        file.write_text("dtype: float32\n")
        checked("smollm2", "--config", str(file))
        with pytest.raises(UsageError, match="names no model; add a line"):
            checked(None, "--config", str(file))
        file.write_text("model: smollm2\nhost: 192.0.2.1\nport: 1\n")  # the command passes its own address
        checked(None, "--config", str(file))
        file.write_text("model: ./nowhere\n")
        with pytest.raises(UsageError, match=r"\./nowhere does not exist"):
            checked(None, "--config", str(file))


class TestOwnOptions:
    def test_options_and_variables_of_devices_are_left_to_them(self) -> None:
        section = {"cpu": {"no_such": 1}, "memory_share": 0.5}
        checked("smollm2", "--additional-config", json.dumps({"backplane": section, "other": 1}), BACKPLANE_CPU_X="1")

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ("[1]", "give an object, such as"),
            ('{"cpu": {}}', "has 'cpu' at its top level"),
            ('{"backplane": 3}', "give an object with options"),
            ('{"backplane": {"cpu": 3}}', "must be an object with the options of that device"),
            ('{"backplane": {"memory_share": 3}}', "expected a number above 0 and at most 1"),
        ],
    )
    def test_a_wrong_option_is_refused(self, config: str, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            checked("smollm2", f"--additional-config={config}")

    def test_an_option_and_a_variable_that_differ_are_refused(self) -> None:
        config = '{"backplane": {"memory_share": 0.5}}'
        with pytest.raises(UsageError, match="remove one"):
            checked("smollm2", "--additional-config", config, BACKPLANE_MEMORY_SHARE="0.6")

    def test_the_devices_are_those_that_are_found(self) -> None:
        assert backplane_options.device_names() == discover().keys()


def test_a_plugin_that_may_add_options_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "some_plugin-1.0.dist-info"
    model_of(info, {"METADATA": "Metadata-Version: 2.1\nName: some-plugin\nVersion: 1.0\n"})
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nsome = some_plugin:register\n")
    with pytest.raises(UsageError, match="unknown option --some"):
        checked("smollm2", "--some-option-of-it", "1")
    monkeypatch.syspath_prepend(str(tmp_path))
    checked("smollm2", "--some-option-of-it", "1")
    with pytest.raises(UsageError, match="unknown option --some"):
        checked("smollm2", "--some-option-of-it", "1", VLLM_PLUGINS="backplane")


def test_the_search_in_vllms_help_is_left_to_vllm() -> None:
    checked("./nowhere", "--help=page")
