"""Tests downloads from a stand-in of a hub, with faults of the network, of the hub and of what it sends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save

from tests.hub_stand_in import COMMIT, Hub, Repository, running_hub
from tests.valid_gguf_models import MODELS, mutated_model
from vllm_backplane.added_models import entries, hub, hub_names, lookup, names, serving
from vllm_backplane.added_models.entries import Entry
from vllm_backplane.added_models.hub_names import HubName
from vllm_backplane.added_models.progress import Progress
from vllm_backplane.errors import BackplaneError, CheckpointError, UsageError

COMMAND = Path(sys.executable).with_name("vllm-backplane")
(WHOLE,) = mutated_model(b"\0")
PARTS = mutated_model(bytes([list(MODELS).index("in two parts")]))
CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"]}).encode()
WEIGHTS = save({"a": np.ones((40, 40), np.float32), "b": np.ones(4, np.float16)})
CHUNK = 1024


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Provides a hub that huggingface_hub uses, and an empty cache."""
    with running_hub() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _seconds: None)
        monkeypatch.setenv("HF_TOKEN", "")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("BACKPLANE_CACHE", str(tmp_path / "cache"))
        running.repositories["org/m-GGUF"] = Repository(
            {"README.md": b"#", "m-Q4_K_M.gguf": WHOLE, "m-Q8_0.gguf": WHOLE, "mmproj-F16.gguf": b"?" * 2000}
        )
        running.repositories["org/plain"] = Repository(
            {
                "config.json": CONFIG,
                "model.safetensors": WEIGHTS,
                "tokenizer.json": b"{}",
                "generation_config.json": b"{}",
                "chat_template.jinja": b"{{ messages }}",
                "1_Pooling/config.json": b"{}",
                **dict.fromkeys(("pytorch_model.bin", "onnx/model.onnx", "consolidated.safetensors"), b"?" * 2000),
            }
        )
        yield running


def add(given: str, name: str | None = None, *, replace: bool = False, said: list[str] | None = None) -> Entry:
    hub_name = hub_names.parse(given)
    assert hub_name is not None
    progress = Progress([].append if said is None else said.append, bars=False)
    return hub.add_from_hub(hub_name, name, replace=replace, progress=progress)


def left() -> list[str]:
    """Returns the names in the folder of added models, except locks."""
    return sorted(one.name for one in entries.root().iterdir() if not one.name.endswith(".lock"))


def test_a_quantization_is_downloaded_and_verified(served: Hub) -> None:
    entry = add("org/m-GGUF:q4_k_m")
    assert entry.name == "m-Q4_K_M" and entry.path.read_bytes() == WHOLE
    assert (entry.format.kind, entry.format.architecture) == ("GGUF", "llama")
    assert entry.source.commit == COMMIT and entry.fault(contents=True) is None
    assert left() == ["m-Q4_K_M"]
    assert lookup("m-Q4_K_M") == entry == lookup("org/m-GGUF:Q4_K_M")
    [download] = served.downloads()
    assert "authorization" not in download.headers


def test_what_was_added_is_served_without_asking_the_hub_again(served: Hub) -> None:
    path = serving.path_to_serve("org/m-GGUF:Q8_0", print)
    assert path is not None and path.name == "m-Q8_0.gguf"
    served.requests.clear()
    assert serving.path_to_serve("org/m-GGUF:Q8_0", print) == serving.path_to_serve("m-Q8_0", print) == path
    assert served.requests == []


def test_adding_it_again_downloads_nothing(served: Hub) -> None:
    add("org/m-GGUF:Q8_0")
    served.requests.clear()
    said: list[str] = []
    assert add("org/m-GGUF:m-Q8_0.gguf", said=said).name == "m-Q8_0"
    assert served.downloads() == [] and said == ["m-Q8_0 was added before"]
    served.repositories["org/m-GGUF"].commit = "f" * 40
    with pytest.raises(UsageError, match="--replace"):
        add("org/m-GGUF:Q8_0")
    assert add("org/m-GGUF:Q8_0", replace=True).source.commit == "f" * 40


def test_only_what_serving_needs_is_downloaded(served: Hub) -> None:
    entry = add("org/plain")
    assert set(entry.files) == {
        *("config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "chat_template.jinja"),
        "1_Pooling/config.json",
    }
    assert entry.path.is_dir() and str(entry.format) == "safetensors F32, LlamaForCausalLM"
    assert len(served.downloads()) == 1, "small files come from the hub itself"


def test_all_parts_of_a_split_file_are_downloaded_into_one_folder(served: Hub) -> None:
    files = {f"Q4_0/m-Q4_0-0000{number}-of-00002.gguf": part for number, part in enumerate(PARTS, 1)}
    served.repositories["org/parts"] = Repository(files)
    entry = add("org/parts:Q4_0")
    assert entry.name == "m-Q4_0" and entry.main == "m-Q4_0-00001-of-00002.gguf"
    assert [file.parent for file in sorted(entry.folder.iterdir())] == [entry.folder] * 2
    del served.repositories["org/parts"].files["Q4_0/m-Q4_0-00002-of-00002.gguf"]
    with pytest.raises(BackplaneError, match=r"no Q4_0/m-Q4_0-00002-of-00002\.gguf"):
        add("org/parts:Q4_0", "another")


def test_a_connection_that_is_cut_is_continued(served: Hub) -> None:
    served.cuts = [5 * CHUNK + 7, 3 * CHUNK]
    entry = add("org/m-GGUF:Q8_0")
    assert entry.path.read_bytes() == WHOLE
    assert [one.range for one in served.downloads()] == [None, f"bytes={5 * CHUNK}-", f"bytes={8 * CHUNK}-"]


def test_an_interrupted_download_is_continued_by_the_next_command(served: Hub) -> None:
    served.cuts, served.statuses = [4 * CHUNK], [0, 503]
    with pytest.raises(BackplaneError, match="status 503; try again later: what was downloaded is kept"):
        add("org/m-GGUF:Q8_0")
    assert left() == [".m-Q8_0.partial"] and entries.unfinished() == ["m-Q8_0"] and names() == []
    served.requests.clear()
    said: list[str] = []
    assert add("org/m-GGUF:Q8_0", said=said).path.read_bytes() == WHOLE
    assert [one.range for one in served.downloads()] == [f"bytes={4 * CHUNK}-"]
    assert "4.0 KiB of it are here" in said[0] and left() == ["m-Q8_0"]


def test_what_was_downloaded_of_another_commit_is_not_continued(served: Hub) -> None:
    served.cuts, served.statuses = [4 * CHUNK], [0, 503]
    with pytest.raises(BackplaneError):
        add("org/m-GGUF:Q8_0")
    served.repositories["org/m-GGUF"].commit = "f" * 40
    served.requests.clear()
    add("org/m-GGUF:Q8_0")
    assert [one.range for one in served.downloads()] == [None]


def test_a_server_without_ranges_sends_the_file_from_the_beginning(served: Hub) -> None:
    served.cuts, served.ignores_ranges = [4 * CHUNK], True
    assert add("org/m-GGUF:Q8_0").path.read_bytes() == WHOLE


def test_a_verified_download_that_is_killed_before_it_has_its_name_is_used_again(
    served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path == entries.staging("m-Q8_0"):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            add("org/m-GGUF:Q8_0")
    served.requests.clear()
    digested: list[Path] = []
    digest = hub.digest
    monkeypatch.setattr(hub, "digest", lambda path, *more: digested.append(path) or digest(path, *more))
    assert add("org/m-GGUF:Q8_0").path.read_bytes() == WHOLE
    assert served.downloads() == [] and len(digested) == 1 and left() == ["m-Q8_0"]
    assert sorted(one.name for one in (entries.root() / "m-Q8_0").iterdir()) == [entries.FILES, entries.MANIFEST]


def test_a_transfer_that_ends_early_is_continued_while_bytes_arrive(
    served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers with less than was announced, which huggingface_hub reports with an OSError without a number."""
    arriving = [CHUNK, 2 * CHUNK, 0]

    def ends_early(_url: str, stream: Any, *, resume_size: int, **_more: Any) -> None:
        count = arriving.pop(0)
        stream.write(WHOLE[resume_size : resume_size + count])
        raise OSError("Consistency check failed: file should be of size 9 but has size 5 (m).")

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.file_download.http_get", ends_early)
        with pytest.raises(BackplaneError, match=r"ended a transfer early; .* is kept"):
            add("org/m-GGUF:Q8_0")
    assert add("org/m-GGUF:Q8_0").path.read_bytes() == WHOLE
    assert [one.range for one in served.downloads()] == [f"bytes={3 * CHUNK}-"]


def test_a_damaged_part_is_downloaded_again(served: Hub) -> None:
    served.cuts, served.statuses = [4 * CHUNK], [0, 503]
    with pytest.raises(BackplaneError):
        add("org/m-GGUF:Q8_0")
    [part] = entries.staging("m-Q8_0").rglob("*.part")
    part.write_bytes(bytes(part.stat().st_size))
    assert add("org/m-GGUF:Q8_0").path.read_bytes() == WHOLE


@pytest.mark.parametrize("file", ["m-Q8_0.gguf", "README.md"])
def test_other_content_is_refused_and_nothing_of_it_is_kept(served: Hub, file: str) -> None:
    content = served.repositories["org/m-GGUF"].files.pop(file)
    served.repositories["org/m-GGUF"].files["m-Q8_0.gguf"] = content
    served.changed["m-Q8_0.gguf"] = content[:-1] + b"!"
    with pytest.raises(BackplaneError, match="is not the file whose digest"):
        add("org/m-GGUF:Q8_0")
    assert [one for one in entries.root().rglob("*.gguf*") if one.is_file()] == [] and names() == []


@pytest.mark.parametrize("content", [WHOLE + b"more", WHOLE[:-1000]], ids=["longer", "shorter"])
def test_another_length_is_refused(served: Hub, content: bytes) -> None:
    served.changed["m-Q8_0.gguf"] = content
    with pytest.raises(BackplaneError, match=r"sends more than the|is not the file whose digest"):
        add("org/m-GGUF:Q8_0")
    assert names() == []


def test_a_file_that_is_no_model_is_refused_and_removed(served: Hub) -> None:
    served.repositories["org/m-GGUF"].files["m-Q8_0.gguf"] = WHOLE[:-1000]
    with pytest.raises(CheckpointError, match="not a valid GGUF file"):
        add("org/m-GGUF:Q8_0")
    assert left() == []


def test_a_hub_that_says_nothing_more_is_not_waited_for(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    served.cuts = [2 * CHUNK, *[0] * 9]
    served.silent.set()
    with pytest.raises(BackplaneError, match=r"does not answer in time .* what was downloaded is kept"):
        add("org/m-GGUF:Q8_0")
    assert served.downloads()[-1].range == f"bytes={2 * CHUNK}-"
    [part] = entries.staging("m-Q8_0").rglob("*.part")
    assert part.stat().st_size == 2 * CHUNK


def test_a_token_is_sent_to_the_hub_and_not_to_the_other_host(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    served.repositories["org/m-GGUF"].token = "secret"
    with pytest.raises(UsageError, match=r"no model org/m-GGUF that you may see.*HF_TOKEN"):
        add("org/m-GGUF:Q8_0")
    monkeypatch.setenv("HF_TOKEN", "secret")
    add("org/m-GGUF:Q8_0")
    assert all("authorization" not in request.headers for request in served.downloads())
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(BackplaneError, match="does not accept the token"):
        add("org/m-GGUF:Q4_K_M")


def test_a_gated_model_names_the_page_with_its_conditions(served: Hub) -> None:
    served.repositories["org/m-GGUF"].gated = True
    with pytest.raises(BackplaneError, match=r"accept its conditions on http://127.*/org/m-GGUF, then set HF_TOKEN"):
        add("org/m-GGUF:Q8_0")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("org/none:Q4_0", "no model org/none"),
        ("org/m-GGUF:Q8_0@v9", "no revision 'v9'"),
        ("org/m-GGUF:Q5_0", r"has no 'Q5_0'; it has Q4_K_M, Q8_0$"),
        ("org/m-GGUF:Q4_K", "has no 'Q4_K'"),
        ("org/m-GGUF:other.gguf", r"has no 'other\.gguf'"),
        ("org/m-GGUF", r"has GGUF files: Q4_K_M, Q8_0; choose one, as in org/m-GGUF:Q4_K_M$"),
        ("org/plain:Q4_0", "has no GGUF files; leave out ':Q4_0'"),
    ],
)
def test_what_is_not_there_is_reported_with_what_is(served: Hub, given: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        add(given)
    assert served.downloads() == []


def test_a_revision_is_downloaded_as_it_is_named(served: Hub) -> None:
    served.repositories["org/m-GGUF"].revisions = ("main", "refs/pr/1")
    assert add("org/m-GGUF:Q8_0@refs/pr/1").source.revision == "refs/pr/1"
    assert serving.is_served_by_name("org/m-GGUF:Q8_0@refs/pr/1")


def test_weights_that_are_pickled_are_refused(served: Hub) -> None:
    served.repositories["org/old"] = Repository({"config.json": CONFIG, "pytorch_model.bin": b"?" * 2000})
    with pytest.raises(BackplaneError, match=r"'pytorch_model\.bin'.*can run code.*convert it to safetensors"):
        add("org/old")


def test_several_files_of_a_quantization_have_to_be_chosen_from(served: Hub) -> None:
    served.repositories["org/two"] = Repository({"a-Q4_0.gguf": WHOLE, "b-Q4_0.gguf": WHOLE})
    with pytest.raises(UsageError, match=r"2 files of org/two.*org/two:a-Q4_0\.gguf: a-Q4_0\.gguf, b-Q4_0\.gguf"):
        add("org/two:Q4_0")
    assert add("org/two:b-Q4_0.gguf").name == "b-Q4_0"


def test_a_type_that_is_not_served_is_refused_before_the_download(served: Hub) -> None:
    served.repositories["org/small"] = Repository({"m-UD-IQ2_XXS.gguf": WHOLE, "m-Q8_0.gguf": WHOLE})
    with pytest.raises(UsageError, match="type UD-IQ2_XXS are not served; choose another: Q8_0, UD-IQ2_XXS"):
        add("org/small:IQ2_XXS")
    assert served.downloads() == []


@pytest.mark.parametrize(
    "describe",
    [
        lambda found: b"<html>Please log in</html>",
        lambda found: b"[" * 100_000,
        lambda found: [1, 2],
        lambda found: found | {"sha": "../../x"},
        lambda found: found | {"siblings": [{"rfilename": 5, "size": 3}]},
        lambda found: found | {"siblings": [{"rfilename": "m-Q8_0.gguf", "size": -3}]},
    ],
)
def test_another_kind_of_answer_is_an_error(served: Hub, describe: Any) -> None:
    served.repositories["org/m-GGUF"].describe = describe
    with pytest.raises(BackplaneError, match="does not answer like a hub"):
        add("org/m-GGUF:Q8_0")


@pytest.mark.parametrize("name", ["../../m-Q8_0.gguf", "/m-Q8_0.gguf", "a/../m-Q8_0.gguf", "m\n-Q8_0.gguf"])
def test_names_that_lead_out_of_the_folder_are_ignored(served: Hub, name: str) -> None:
    served.repositories["org/m-GGUF"].files = {name: WHOLE}
    with pytest.raises(UsageError, match="org/m-GGUF has no GGUF files"):
        add("org/m-GGUF:Q8_0")
    assert served.downloads() == []


def test_a_file_without_a_digest_is_refused(served: Hub) -> None:
    def describe(found: dict[str, Any]) -> dict[str, Any]:
        for one in found["siblings"]:
            one.pop("lfs", None)
            del one["blobId"]
        return found

    served.repositories["org/m-GGUF"].describe = describe
    with pytest.raises(BackplaneError, match=r"no size and digest of m-Q8_0\.gguf"):
        add("org/m-GGUF:Q8_0")


def test_too_little_space_is_reported_with_numbers_before_the_download(
    served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: _Usage(1024))
    with pytest.raises(BackplaneError, match=r"org/m-GGUF:Q8_0 needs \d\d\.\d KiB more, and 1\.0 KiB are free"):
        add("org/m-GGUF:Q8_0")
    assert served.downloads() == []


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def test_no_network_and_no_permission_to_use_it_are_told_apart(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set"):
        add("org/m-GGUF:Q8_0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(BackplaneError, match=r"127\.0\.0\.1:9 cannot be reached"):
        add("org/m-GGUF:Q8_0")


def test_two_at_once_download_once(served: Hub) -> None:
    found: list[Entry] = []
    threads = [threading.Thread(target=lambda: found.append(add("org/m-GGUF:Q8_0"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] and len(served.downloads()) == 1


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("org/m:Q4_0", HubName("org/m", "Q4_0", "")),
        ("org/m:sub/m.gguf@main", HubName("org/m", "sub/m.gguf", "main")),
        ("org/m@refs/pr/3", HubName("org/m", "", "refs/pr/3")),
        *((name, None) for name in ("m", "./m", "../m", "/a/b", "a/b/c", "s3://a/b", "a/b:", "a/b:Q 4", "a/b@", "~/m")),
    ],
)
def test_names_of_the_hub_are_told_from_paths(given: str, parsed: HubName | None) -> None:
    assert hub_names.parse(given) == parsed
    assert parsed is None or str(parsed) == given


@pytest.mark.process
def test_the_command_is_interrupted_and_continues(served: Hub, tmp_path: Path) -> None:
    """Runs the real command with a file of several chunks, and sends it SIGINT when the hub has fallen silent."""
    served.repositories["org/big"] = Repository({"config.json": CONFIG, "model.safetensors": _large()})
    environment = {**os.environ, "HF_ENDPOINT": served.url, "BACKPLANE_CACHE": str(tmp_path / "cache")}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_TOKEN": "", "HF_HUB_DOWNLOAD_TIMEOUT": "60"}
    command = [str(COMMAND), "model", "add", "org/big"]
    served.cuts = [25 << 20]
    served.silent.set()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
        part = entries.staging("big") / entries.FILES / "model.safetensors.part"
        while not (part.exists() and part.stat().st_size >= 20 << 20):
            assert first.poll() is None, first.communicate()
        first.send_signal(signal.SIGINT)
        said = first.communicate()[1]
    assert first.returncode == 130 and "run the same command again to continue" in said and "Traceback" not in said
    served.silent.clear()
    listed = subprocess.run([COMMAND, "model", "list"], env=environment, capture_output=True, text=True)
    assert listed.returncode == 0 and "unfinished" in listed.stdout.splitlines()[-1], listed.stderr
    second = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True)
    assert second.returncode == 0 and json.loads(second.stdout)["name"] == "big", second.stderr
    assert second.stderr == ""
    assert [request.range for request in served.downloads()] == [None, f"bytes={20 << 20}-"]


def _large() -> bytes:
    return save({"a": np.zeros(30 << 20, np.uint8)})
