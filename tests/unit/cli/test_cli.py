"""Tests the command `vllm-backplane`, up to the point where `serve` runs vLLM's own command."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from typing import NoReturn

import pytest

from tests.ports import free_port
from vllm_backplane import cli
from vllm_backplane.cli import main, serve
from vllm_backplane.errors import BackplaneError
from vllm_backplane.models import DEFAULT, models, prepared_folder
from vllm_backplane.page.loading import MIDDLEWARE

PAGE = ("--middleware", MIDDLEWARE)
"""The arguments that add the page of the server."""


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for variable in ("BACKPLANE_DEVICE", "VLLM_PLUGINS", "VLLM_TARGET_DEVICE"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Creates folders that look prepared, so that tests of the command line download nothing."""
    monkeypatch.setenv("BACKPLANE_CACHE", str(tmp_path))
    for model in models():
        folder = prepared_folder(model)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        manifest = {"files": {"config.json": {"size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}}}
        (folder / "backplane-manifest.json").write_text(json.dumps(manifest))
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Returns vLLM's arguments after 'serve', and the variables that would be set."""
    assert main(["serve", *arguments, "--dry-run", "--json"]) == 0
    launch = json.loads(capsys.readouterr().out)
    assert launch["command"][:2] == ["vllm", "serve"]
    return launch["command"][2:], launch["variables"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    assert main(list(arguments)) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("vllm-backplane: error: ")
    return captured.err


def test_every_module_of_the_package_is_a_command():
    found = cli.commands()
    assert {"serve", "model"} <= set(found)
    for name, command in found.items():
        assert name == command.NAME
        assert command.HELP
        assert "\n" not in command.HELP
        assert command.__doc__, f"{name} has no description"


def test_the_auditor_is_a_command_of_its_own_now(capsys):
    assert main(["audit", "my plugin", "--vllm", "0.10.2", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "vllm-backplane: error: the auditor is the command 'vllm-patchbay audit' now; "
        "run: vllm-patchbay audit 'my plugin' --vllm 0.10.2 --json\n"
    )
    assert "audit" not in cli.commands()
    assert "audit" not in cli.build_parser().format_help()


@pytest.mark.process
def test_the_line_that_replaces_the_auditor_is_a_command_line_of_vllm_patchbay(tmp_path):
    """The installed script prints the line, and a shell runs it up to the parser of vllm-patchbay."""
    folder = os.path.dirname(sys.executable)
    done = subprocess.run(
        [os.path.join(folder, "vllm-backplane"), "audit", "--help"], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    command = done.stderr.partition("run: ")[2]
    pasted = subprocess.run(command, shell=True, capture_output=True, text=True, env={**os.environ, "PATH": folder})
    assert (pasted.returncode, pasted.stderr) == (0, "")
    assert pasted.stdout.startswith("usage: vllm-patchbay audit")


def test_an_error_of_patchbay_is_one_line(capsys):
    assert "no_such_patch" in refused(capsys, "patches", "show", "no_such_patch", status=1)


@pytest.mark.process
@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["model", "list", "--json"]])
def test_what_needs_no_engine_does_not_import_one(arguments):
    program = (
        "import sys\n"
        "from vllm_backplane.cli import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "print({'torch', 'vllm', 'transformers'} & set(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout
    assert done.stderr.strip() == "set()"


@pytest.mark.process
def test_the_script_is_installed_and_knows_its_version():
    script = os.path.join(os.path.dirname(sys.executable), "vllm-backplane")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("vllm-backplane ")
    assert "not installed" not in done.stdout


@pytest.mark.parametrize("arguments", [[], ["srve"], ["model"], ["model", "list", "--jsn"], ["model", "path"]])
def test_a_wrong_command_line_ends_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.parametrize(
    ("status", "message", "code"),
    [(None, "", 0), (0, "", 0), (3, "", 3), ("'its engine died'", "its engine died\n", 1)],
)
def test_leaving_is_an_exit_but_for_what_takes_long(status, message, code):
    program = (
        "import atexit\n"
        "from vllm_backplane.process.fast_exit import exit_without_teardown\n"
        "class Large:\n"
        "    def __del__(self):\n"
        "        print('taken apart')\n"
        "kept = Large()\n"
        "atexit.register(print, 'registered')\n"
        f"exit_without_teardown({status})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "registered\n", message)


class TestSockets:
    @pytest.fixture
    def at_exit(self, monkeypatch):
        found = []
        monkeypatch.setattr(atexit, "register", lambda *call, **options: found.append((call, options)))
        return found

    def test_they_have_a_folder_that_goes_at_the_end(self, monkeypatch, at_exit):
        base = tempfile.mkdtemp()
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", base)
        serve.use_own_socket_folder()
        folder = os.environ["VLLM_RPC_BASE_PATH"]
        assert os.path.dirname(folder) == base and os.listdir(base) == [os.path.basename(folder)]
        for (function, *arguments), options in at_exit:
            function(*arguments, **options)
        assert os.listdir(base) == []
        os.rmdir(base)

    def test_a_name_that_would_get_too_long_stays(self, tmp_path, monkeypatch, at_exit):
        long = tmp_path / ("x" * 60)
        long.mkdir()
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(long))
        serve.use_own_socket_folder()
        assert os.environ["VLLM_RPC_BASE_PATH"] == str(long) and not at_exit

    def test_a_missing_folder_is_rejected(self, tmp_path, monkeypatch, at_exit):
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path / "nowhere"))
        with pytest.raises(BackplaneError, match=r"VLLM_RPC_BASE_PATH is .*nowhere, which is not a folder"):
            serve.use_own_socket_folder()


class TestServe:
    def test_without_a_model_the_default_is_served_on_the_local_host(self, prepared, capsys):
        arguments, variables = planned(capsys)
        assert arguments == [
            *(str(prepared_folder(DEFAULT)), "--served-model-name", "SmolLM2-135M-Instruct", "--dtype", "float32"),
            *("--host", "127.0.0.1", "--port", "8000", *PAGE),
        ]
        assert variables == {"BACKPLANE_COMMAND": "serve"}

    @pytest.mark.process
    def test_a_model_that_changed_and_kept_its_size_is_not_served(self, prepared, capsys, monkeypatch):
        (prepared_folder(DEFAULT) / "config.json").write_text("[]")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        assert main(["serve", "--dry-run"]) == 1
        output = capsys.readouterr().err
        assert "preparing smollm2 again: config.json has changed" in output
        assert "could not download" in output

    def test_a_bundled_name_becomes_its_folder(self, prepared, capsys):
        arguments, _ = planned(capsys, "minilm")
        assert arguments[0].startswith(str(prepared / "models" / "minilm-"))
        assert arguments[1:3] == ["--served-model-name", "all-MiniLM-L6-v2"]

    def test_any_other_model_goes_to_vllm_as_it_is(self, capsys):
        arguments, _ = planned(capsys, "./some/folder", "--port", "9")
        assert arguments == ["./some/folder", "--host", "127.0.0.1", "--port", "9", *PAGE]

    def test_unknown_arguments_go_to_vllm_in_their_order(self, prepared, capsys):
        passed = ["--dtype", "float32", "-tp", "2", "--additional-config", '{"a": 1}', "--por=1"]
        arguments, _ = planned(capsys, "--host", "::1", *passed)
        assert arguments[0] == str(prepared_folder(DEFAULT))
        assert arguments[3:] == ["--host", "::1", "--port", "8000", *PAGE, *passed]

    @pytest.mark.parametrize("spelled", [["--served-model-name", "me"], ["--served_model_name=me"]])
    def test_a_name_of_ones_own_is_kept(self, prepared, capsys, spelled):
        arguments, _ = planned(capsys, "smollm2", *spelled)
        assert "SmolLM2-135M-Instruct" not in arguments
        assert arguments[-len(spelled) :] == spelled

    def test_a_configuration_file_names_the_model_unless_the_command_line_does(self, prepared, capsys):
        arguments, _ = planned(capsys, "--config", "serve.yaml")
        assert arguments == ["--host", "127.0.0.1", "--port", "8000", *PAGE, "--config", "serve.yaml"]
        arguments, _ = planned(capsys, "smollm2", "--config=serve.yaml")
        assert arguments[0] == str(prepared_folder(DEFAULT))

    def test_the_device_becomes_a_variable(self, prepared, capsys, monkeypatch):
        assert planned(capsys, "--device", "cpu")[1] == {"BACKPLANE_DEVICE": "cpu"}
        monkeypatch.setenv("BACKPLANE_DEVICE", "cpu")
        assert planned(capsys, "--device", "cpu")[1] == {"BACKPLANE_DEVICE": "cpu"}

    def test_a_device_that_contradicts_the_environment_is_refused(self, prepared, capsys, monkeypatch):
        monkeypatch.setenv("BACKPLANE_DEVICE", "sim")
        output = refused(capsys, "serve", "--device", "cpu", "--dry-run")
        assert "'cpu'" in output
        assert "'sim'" in output

    @pytest.mark.parametrize(
        ("variable", "value", "remedy"),
        [
            ("VLLM_PLUGINS", "", "unset VLLM_PLUGINS"),
            ("VLLM_PLUGINS", "other,backplanes", "set VLLM_PLUGINS=other,backplanes,backplane"),
            ("VLLM_PLUGINS", "other, backplane", "remove the spaces"),
            ("VLLM_TARGET_DEVICE", "cpu", "unset VLLM_TARGET_DEVICE"),
        ],
    )
    def test_an_environment_that_locks_the_plugin_out_is_refused(
        self, prepared, capsys, monkeypatch, variable, value, remedy
    ):
        monkeypatch.setenv(variable, value)
        output = refused(capsys, "serve", "--dry-run")
        assert variable in output
        assert remedy in output

    def test_a_plugin_list_with_ours_in_it_is_fine(self, prepared, capsys, monkeypatch):
        monkeypatch.setenv("VLLM_PLUGINS", "other,backplane")
        arguments, _ = planned(capsys, "./folder")
        assert "--middleware" not in arguments, "a page must be named too"

    def test_the_page_can_be_left_out(self, capsys, monkeypatch):
        arguments, _ = planned(capsys, "./folder", "--no-page")
        assert arguments == ["./folder", "--host", "127.0.0.1", "--port", "8000"]
        monkeypatch.setenv("VLLM_PLUGINS", "backplane,backplane_page")
        assert "remove backplane_page" in refused(capsys, "serve", "./folder", "--no-page", "--dry-run")

    def test_the_option_model_is_refused(self, prepared, capsys):
        assert "first argument" in refused(capsys, "serve", "--model", "x", "--dry-run")

    def test_json_without_dry_run_is_refused(self, prepared, capsys):
        assert "--dry-run" in refused(capsys, "serve", "--json")

    @pytest.mark.parametrize("port", ["0", "65536", "http", "-1"])
    def test_a_port_that_is_none_is_refused(self, capsys, port):
        with pytest.raises(SystemExit) as end:
            main(["serve", f"--port={port}"])
        assert end.value.code == 2
        assert "not a port number" in capsys.readouterr().err

    def test_the_text_of_a_dry_run_can_be_pasted(self, prepared, capsys):
        assert main(["serve", "a model", "--device", "cpu", "--dry-run"]) == 0
        line = capsys.readouterr().out.strip()
        assert line.startswith("BACKPLANE_DEVICE=cpu vllm serve ")
        assert "'a model'" in line

    def test_it_becomes_vllm_with_the_variables_set(self, prepared, monkeypatch):
        started: list[tuple[list[str], str]] = []

        def run_vllm(launch: serve.Launch) -> NoReturn:
            started.append((launch.command, os.environ["BACKPLANE_DEVICE"]))
            raise SystemExit(0)

        monkeypatch.setattr(serve, "run_vllm", run_vllm)
        monkeypatch.setattr(os, "environ", os.environ.copy())
        with pytest.raises(SystemExit):
            main(["serve", "smollm2", "--device", "cpu", "--port", str(free_port())])
        ((command, device),) = started
        assert command[:3] == ["vllm", "serve", str(prepared_folder(DEFAULT))]
        assert device == "cpu"


class TestModel:
    def test_list_reports_the_state_of_each(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setenv("BACKPLANE_CACHE", str(tmp_path))
        assert main(["model", "list", "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)
        assert [(m["name"], m["state"], m["default"]) for m in listed] == [
            ("smollm2", "not prepared", True),
            ("smollm2-fp32", "not prepared", False),
            ("minilm", "not prepared", False),
        ]
        assert list(tmp_path.iterdir()) == []

    def test_list_as_text_has_a_line_for_each(self, prepared, capsys):
        assert main(["model", "list"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == ["NAME", "smollm2", "smollm2-fp32", "minilm"]
        assert all(line.endswith("prepared") for line in lines[1:])

    def test_path_prints_the_folder_alone(self, prepared, capsys):
        assert main(["model", "path", "smollm2"]) == 0
        assert capsys.readouterr().out == f"{prepared_folder(DEFAULT)}\n"

    def test_verify_compares_contents_and_changes_nothing(self, prepared, capsys):
        (prepared_folder(DEFAULT) / "config.json").write_text("[]")
        assert main(["model", "verify", "smollm2", "--json"]) == 1
        output = json.loads(capsys.readouterr().out)
        assert output["whole"] is False
        assert "config.json has changed" in output["fault"]
        assert (prepared_folder(DEFAULT) / "config.json").read_text() == "[]"
        assert main(["model", "verify", "smollm2"]) == 1
        assert "model path smollm2 --verify" in capsys.readouterr().out

    def test_an_unknown_name_is_an_error_with_a_hint(self, capsys):
        assert "did you mean 'minilm'" in refused(capsys, "model", "path", "minlm")


def test_the_status_of_a_signal_is_read_from_the_handler_of_a_headless_server() -> None:
    def signal_handler(signum: int, frame: object) -> None:
        raise SystemExit

    with pytest.raises(SystemExit) as end:
        signal_handler(15, None)
    assert serve._status_of_signal(end.value) == 143


def test_an_exit_without_a_status_that_no_signal_caused_is_a_success() -> None:
    with pytest.raises(SystemExit) as end:
        sys.exit()
    assert serve._status_of_signal(end.value) == 0


def test_a_control_group_that_has_no_room_for_the_libraries_is_refused(prepared, capsys, monkeypatch):
    """Tests it with numbers of a group: the test of a real one is in test_processes.py, where groups can be made."""
    limits = [(8 << 30, 0), (700 << 20, 5 << 20)]
    monkeypatch.setattr(serve, "control_group_limits", lambda: limits)
    error = refused(capsys, "serve", status=1)
    assert (
        "limits the memory of this process to 0.68 GiB, and a server needs 1 GiB" in error
        and "raise the limit" in error
    )
    assert planned(capsys), "nothing is served"
    del limits[1]
    serve.require_memory_of_control_group()
