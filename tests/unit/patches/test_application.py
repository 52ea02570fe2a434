"""Tests which patches apply, and for which vLLM version, in a process that starts like vLLM's processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import programs
from tests.environment import AT_START
from vllm_backplane.settings.releases import NEWEST
from vllm_patchbay.patch import take_fingerprint
from vllm_patchbay.upstream import SymbolIndex, installed_tree

pytestmark = pytest.mark.process

START = """
from vllm import envs
from vllm.plugins import load_general_plugins
from vllm.platforms import current_platform

load_general_plugins()
(getattr(envs, "validate_environ", None) or current_platform.validate_environ)(True)  # the first in vLLM 0.30
from vllm_backplane.patches import application
print(type(current_platform).__name__, application.session().version, sorted(application.session().verdicts))
"""


SERIES = f"0.{NEWEST.series[1] + 1}"
LATER = f"{SERIES}.0"
"""A release after the newest one that is supported."""


def _start(program: str = START, **variables: str) -> subprocess.CompletedProcess[str]:
    return programs.run(programs.command(program), env={**AT_START, **variables})


def test_the_version_variable_decides_and_vllm_accepts_it() -> None:
    done = _start(VLLM_VERSION="0.32.1.dev3+gabcdef0")
    ours = [
        "_set_default_chunked_prefill_and_prefix_caching_args",
        "maybe_override_with_speculators",
        "serve_http",
    ]
    # vLLM 0.30 logs to stdout too.
    assert done.stdout.splitlines()[-1:] == [f"BackplanePlatform 0.32.1.dev3+gabcdef0 {ours}"], done.stderr[-2000:]


def test_a_version_that_was_not_examined_stops_the_start_with_a_remedy() -> None:
    done = _start(VLLM_VERSION=LATER)
    assert done.returncode != 0
    assert (
        f"patch serve_http: it is for vLLM >=0.30,<{SERIES}, and whether {LATER} needs it has not been" in done.stderr
    )
    assert f"Install vLLM >=0.30,<{SERIES}" in done.stderr
    assert "set BACKPLANE_PATCH_DRIFT=warn" in done.stderr
    done = _start(VLLM_VERSION=LATER, BACKPLANE_PATCH_DRIFT="warn")
    assert done.stdout.splitlines()[-1].split()[:2] == ["BackplanePlatform", LATER], done.stderr[-2000:]


WORKER = """
from types import SimpleNamespace

from vllm.config import ProfilerConfig
from vllm.platforms import current_platform

assert current_platform.is_backplane
from vllm_backplane.worker.worker import BackplaneWorker

try:
    BackplaneWorker(SimpleNamespace(profiler_config=ProfilerConfig()))
except BaseException as fault:
    print(type(fault).__name__, fault)
"""

FIRST = """
from vllm_patchbay.patch import Patch, Process

@Patch(
    target="vllm.v1.worker.gpu_worker:Worker.__init__",
    process=Process.WORKER,
    versions=">=0.30",
    why="a test",
    how="shows that it runs",
    upstream="none: a test",
    remove_when="never",
    fingerprints={{"0.32.0": "{fingerprint}"}},
)
def first(self, *args, **kwargs):
    raise SystemExit("the patch runs")
"""


def test_the_patches_of_a_worker_are_applied_before_it_runs(tmp_path: Path) -> None:
    folder = tmp_path / "first_patches" / "worker"
    folder.mkdir(parents=True)
    source = SymbolIndex(installed_tree()).normalized_source_of("vllm.v1.worker.gpu_worker", "Worker.__init__")
    (folder / "patch_gpu_worker.py").write_text(FIRST.format(fingerprint=take_fingerprint(source)))
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    metadata = tmp_path / "first_patches-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: first-patches\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[vllm_backplane.patches]\nfirst = first_patches\n")
    done = _start(WORKER, PYTHONPATH=programs.on_path(tmp_path))
    assert done.stdout.splitlines()[-1:] == ["SystemExit the patch runs"], done.stderr[-2000:]


def test_a_version_that_makes_no_sense_stops_the_start() -> None:
    done = _start(VLLM_VERSION="newest")
    assert done.returncode != 0
    assert "the variable VLLM_VERSION: 'newest' is not a version" in done.stderr


def test_an_unknown_variable_is_still_refused() -> None:
    """Shows that the check of variables, which the version variable passes above, is in force."""
    done = _start(VLLM_VERSIONS="0.32.0")
    assert done.returncode != 0
    assert "Unknown vLLM environment variable detected: VLLM_VERSIONS" in done.stderr
