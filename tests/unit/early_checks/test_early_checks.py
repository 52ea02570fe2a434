"""Checks before vLLM is imported refuse what cannot work, and leave the rest to vLLM."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests import gguf_bytes
from tests.ports import free_port
from vllm_backplane import cli
from vllm_backplane.added_models import entries
from vllm_backplane.cli import _mistakes, serve
from vllm_backplane.device import discover
from vllm_backplane.devices import ON_HOST_MEMORY
from vllm_backplane.early_checks import address, all_checks, backplane_options, check_serve_command, hub, memory
from vllm_backplane.early_checks.config_file import arguments_of, split_config
from vllm_backplane.early_checks.model import check_model
from vllm_backplane.early_checks.vllm_options import Given
from vllm_backplane.errors import UsageError
from vllm_backplane.host import host_memory

PREPARED = ("smollm2", "minilm")


def checked(model: str | None, *arguments: str, port: int = 0, device: str | None = None, **environment: str) -> None:
    check_serve_command(
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

    def test_weights_that_vllm_does_not_open_are_not_checked(self, tmp_path: Path) -> None:
        pointer = "version https://git-lfs.github.com/spec/v1"
        model_of(tmp_path, {"config.json": "{}", "pytorch_model.bin": "x" * 2000, "training_args.bin": pointer})
        (tmp_path / "optimizer.bin").symlink_to(tmp_path / "blob")
        check_model(str(tmp_path), Given(), PREPARED)
        model_of(tmp_path, {"pytorch_model.bin": "", "model.safetensors": "x" * 2000, "._model.safetensors": ""})
        check_model(str(tmp_path), Given(), PREPARED)
        index = json.dumps({"weight_map": {"weight": "model.safetensors"}})
        model_of(tmp_path, {"model.safetensors.index.json": index, "adapter.safetensors": pointer})
        check_model(str(tmp_path), Given(), PREPARED)
        model_of(tmp_path, {"model.safetensors": pointer, "consolidated.safetensors": "x" * 2000, "a.pt": "x"})
        check_model(str(tmp_path), Given(), PREPARED)
        check_model(str(tmp_path), Given({"load_format": "pt"}), PREPARED)
        with pytest.raises(UsageError, match="pointer of Git LFS"):
            check_model(str(tmp_path), Given({"load_format": "hf"}), PREPARED)

    def test_a_missing_path_in_a_folder_without_permission_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "listdir", raising(PermissionError(errno.EACCES, "denied")))
        with pytest.raises(UsageError, match=r"\./nowhere does not exist; give the folder"):
            check_model("./nowhere", Given(), PREPARED)

    def test_names_that_vllm_replaces_are_left_to_it(self) -> None:
        checked("./nowhere", VLLM_MODEL_REDIRECT_PATH="/redirections.json")

    def test_storage_of_another_kind_may_have_long_names(self) -> None:
        checked("s3://" + "x" * 5000)

    def test_a_name_that_no_path_can_have_is_reported(self) -> None:
        with pytest.raises(UsageError, match="cannot be a model: File name too long; give a path or a name"):
            check_model("x" * 5000, Given(), PREPARED)

    def test_a_socket_is_no_model(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("here")
            with pytest.raises(UsageError, match="neither a folder nor a file"):
                check_model("here", Given(), PREPARED)

    def test_a_folder_that_may_not_be_read_is_reported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path))
        monkeypatch.setattr(Path, "iterdir", raising(denied))  # root may read every folder
        with pytest.raises(UsageError, match=f"{tmp_path} cannot be read: Permission denied; change its permissions"):
            check_model(str(tmp_path), Given(), PREPARED)

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

    @pytest.mark.parametrize("value", ["True", " 1 "])
    def test_another_hub_is_left_to_vllm(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_USE_MODELSCOPE", value)
        check_model("user/model", Given(), PREPARED)


class TestHub:
    """The name is in no cache, and the request to the hub is replaced."""

    @pytest.fixture(autouse=True)
    def _online(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    @staticmethod
    def asked(answer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
        from huggingface_hub import HfApi

        monkeypatch.setattr(HfApi, "model_info", answer)
        check_model("user/model", Given(), PREPARED)

    @pytest.mark.parametrize(
        "fault",
        [
            TimeoutError("timed out"),
            json.JSONDecodeError("no JSON", "", 0),
            KeyError("id"),
            ImportError("socksio"),
            OSError(errno.ECONNRESET, "reset"),
        ],
        ids=repr,
    )
    def test_an_error_that_may_pass_is_left_to_vllm(self, fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked(raising(fault), monkeypatch)

    @pytest.mark.parametrize(
        "cause",
        [
            ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
            socket.gaierror(socket.EAI_NONAME, "not known"),
            OSError(errno.ENETUNREACH, "unreachable"),
        ],
        ids=repr,
    )
    def test_a_hub_without_a_connection_is_reported(self, cause: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        fault = RuntimeError("of a library")
        fault.__cause__ = cause
        with pytest.raises(UsageError, match=r"cannot be reached \(of a library\); check the network"):
            self.asked(raising(fault), monkeypatch)

    def test_a_slow_answer_is_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hub, "SECONDS", 0.01)
        end, answered = threading.Event(), threading.Event()

        def answer(*_arguments: Any, **_options: Any) -> None:
            end.wait(60)
            answered.set()

        self.asked(answer, monkeypatch)
        assert not answered.is_set()
        end.set()

    def test_a_name_that_is_too_long_for_a_folder_is_in_no_cache(self) -> None:
        with pytest.raises(UsageError, match="no model of the hub can have that name"):
            check_model("x" * 250, Given(), PREPARED)


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
        shard = ("BF16", (3 << 20 >> 1,), 3 << 20)
        for name in ("model-1.safetensors", "copy-of-model-1.safetensors"):
            safetensors(tmp_path / name, {"first": shard})
        assert not self.refused(tmp_path)
        safetensors(tmp_path / "model-2.safetensors", {"second": shard})
        assert self.refused(tmp_path)
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"second": "model-2.safetensors"}}))
        assert not self.refused(tmp_path)
        index.unlink()
        safetensors(tmp_path / "consolidated.safetensors", {"of Mistral": shard})
        assert not self.refused(tmp_path)
        assert self.refused(tmp_path, load_format="hf")

    def test_only_what_is_certain_is_refused(self, tmp_path: Path) -> None:
        safetensors(tmp_path / "model.safetensors", {"weight": ("BF16", (5 << 20,), 10 << 20)})
        assert self.refused(tmp_path) and self.refused(tmp_path, "sim") and self.refused(tmp_path, None)
        assert not self.refused(tmp_path, "vendor")
        assert not self.refused(tmp_path, nnodes="2")
        assert not self.refused(tmp_path, distributed_executor_backend="ray")
        assert not self.refused(tmp_path, load_format="dummy")
        assert not self.refused(tmp_path, hf_overrides='{"num_hidden_layers": 1}')
        assert not self.refused(tmp_path, mm_encoder_only=True)
        assert not self.refused(tmp_path, language_model_only=True)
        assert not self.refused(tmp_path, data_parallel_size_local="0")
        memory.check_fits(tmp_path, Given(), None, {"cpu", "vendor"})
        (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
        assert not self.refused(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        (tmp_path / "model.safetensors").symlink_to("blob")
        assert not self.refused(tmp_path)
        (tmp_path / "model.safetensors.index.json").write_text("[]")
        assert not self.refused(tmp_path)

    def test_the_files_of_a_prepared_model_count(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        safetensors(tmp_path / "model.safetensors", {"weight": ("BF16", (5 << 20,), 10 << 20)})
        monkeypatch.setattr(serve, "added_names", lambda: ["mine"])
        monkeypatch.setattr(serve, "is_served_by_name", lambda name: name == "mine")
        monkeypatch.setattr(serve, "lookup", lambda name: argparse.Namespace(path=tmp_path))
        asked = argparse.Namespace(rest=["mine"], host="127.0.0.1", port=free_port(), device="cpu")
        with pytest.raises(UsageError, match=r"take at least 0\.0 GiB"):
            serve.check_mistakes(asked, {})

    def test_a_link_to_a_model_that_is_gone_is_a_mistake(self, tmp_path: Path) -> None:
        source = entries.Source("link", path=str(tmp_path))
        files = {"model.gguf": entries.File(1, "", 0)}
        model = entries.Entry("mine", source, entries.Format("GGUF", "Q4_0", "llama"), "model.gguf", files)
        with pytest.raises(UsageError, match=r"model\.gguf does not exist; run 'vllm-backplane model add "):
            model.require_complete()

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
    @pytest.mark.parametrize("host", ["ä" * 300, "\udcff"])
    def test_a_host_that_no_name_can_have_is_reported(self, host: str) -> None:
        with pytest.raises(UsageError, match="is not an address or a known name"):
            address.require_free(host, free_port())

    def test_a_port_that_does_not_exist_is_reported(self) -> None:
        with pytest.raises(UsageError, match=r"--port is 99999, which is not a port number \(1 to 65535\)"):
            checked("smollm2", "--por", "99999")

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
            for arguments in (["--uds", "/tmp/socket"], ["--headless"], ["--api-server-count", "0"]):
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


@pytest.mark.parametrize("version", ["0.33.1", "0.33.0rc1", "0.33.1.dev7+g0123456"])
def test_a_version_that_was_not_recorded_may_have_more_options(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_checks, "installed_version", lambda: Version(version))
    checked("smollm2", "--some-option-of-it", "1")
    with pytest.raises(UsageError, match="not a whole number"):
        checked("smollm2", "-tp", "two")


def raising(fault: Exception) -> Callable[..., Any]:
    def answer(*_arguments: Any, **_options: Any) -> Any:
        raise fault

    return answer


class TestErrorsOfVllm:
    """A function of the given name, in a module of vLLM, raises the error."""

    @staticmethod
    def message(function: str, fault: Exception, call: str = "") -> str | None:
        module = {"__name__": "vllm.entrypoints.cli.serve", "fault": fault, "raising": raising}
        exec(f"def {function}():\n    {call or 'raise fault'}", module)
        try:
            module[function]()
        except Exception as raised:
            found = _mistakes.mistake_behind(raised)
            return None if found is None else str(found)
        raise AssertionError("nothing was raised")

    @pytest.mark.parametrize("function", ["cmd", "run_headless", "run_multi_api_server"])
    def test_what_is_raised_where_everything_runs_is_a_mistake(self, function: str) -> None:
        assert self.message(function, ValueError("--headless: no")) == "--headless: no"
        assert self.message(function, ValueError("of a library"), "raising(fault)()") is None
        assert self.message(function, RuntimeError("of the engine")) is None

    def test_other_types_of_errors_may_be_mistakes(self) -> None:
        from huggingface_hub.errors import StrictDataclassFieldValidationError

        for fault in (AssertionError("not applicable"), ImportError("not applicable")):
            assert self.message("create_engine_config", fault) == "not applicable"
        wrong = StrictDataclassFieldValidationError("hidden_size", TypeError("expected int"))
        shown = self.message("create_engine_config", wrong)
        assert shown is not None and "hidden_size" in shown and "\n" not in shown
        assert self.message("create_engine_config", AssertionError()) is None
        assert self.message("load_weights", AssertionError("not applicable")) is None


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.default_int_handler])
def test_the_command_leaves_ctrl_c_as_it_was(handler: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        assert cli.main(["serve", "--json"]) == 2
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert "--json applies only" in capsys.readouterr().err


def test_the_search_in_vllms_help_is_left_to_vllm() -> None:
    checked("./nowhere", "--help=page")
