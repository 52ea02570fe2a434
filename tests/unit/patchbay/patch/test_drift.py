"""Tests targets that changed since the patch was written, and versions that have not been examined."""

from __future__ import annotations

import pytest

from vllm_patchbay.errors import PatchError
from vllm_patchbay.patch import Outcome

from .conftest import Host, applied


def test_drift_stops_with_a_diff_and_warns_on_request(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    known = {"1.0": host.fingerprint("host_package.core:double")}
    host.rewrite("core.py", "return x * by", "extra = by\n    return x * extra")

    @host.patch("core:double", fingerprints=known)
    def drifted(x, *, by=2):  # type: ignore[no-untyped-def]
        return 0

    with pytest.raises(PatchError) as caught:
        applied(host, drifted)
    message = str(caught.value)
    assert "is not what the patch was written against (vLLM 1.0)" in message
    assert "+     extra = by" in message
    assert "+     return x * extra" in message
    assert "- (1 line removed or changed)" in message
    assert "set PatchSession.drift to 'warn' to apply the patch unchanged" in message
    with pytest.raises(PatchError, match="or set MY_PLUGIN_DRIFT=warn to apply"):
        applied(host, drifted, drift_setting="MY_PLUGIN_DRIFT=warn")
    session = applied(host, drifted, drift="warn")
    assert host.module("core").double(1) == 0
    assert session.verdicts["drifted"].outcome is Outcome.DRIFTED
    assert "not what the patch was written against" in caplog.text


def test_comments_docstrings_and_formatting_are_no_drift(host: Host) -> None:
    known = {"1.0": host.fingerprint("host_package.core:double")}
    host.rewrite("core.py", '"""Twice."""\n    return x * by', '"""Two times."""\n    # why not\n    return (x  *  by)')

    @host.patch("core:double", fingerprints=known)
    def same(x, *, by=2):  # type: ignore[no-untyped-def]
        return 0

    assert applied(host, same).verdicts["same"].outcome is Outcome.FITS


def test_a_patch_may_tolerate_change_and_names_the_reason(host: Host) -> None:
    known = {"1.0": host.fingerprint("host_package.core:double")}
    host.rewrite("core.py", "return x * by", "return by * x")

    @host.patch("core:double", fingerprints=known, tolerates_change="it only adds a log line")
    def tolerant(x, *, by=2):  # type: ignore[no-untyped-def]
        return 0

    verdict = applied(host, tolerant).verdicts["tolerant"]
    assert verdict.outcome is Outcome.TOLERATED
    assert "it only adds a log line" in verdict.detail


@pytest.mark.parametrize(
    ("version", "outcome"),
    [
        ("1.0", Outcome.FITS),
        ("1.0rc2.dev5+gabc", Outcome.FITS),
        ("1.5.dev3+gabc", Outcome.FITS),
        ("0.9", Outcome.NOT_NEEDED),
        ("1.7.1", Outcome.NOT_NEEDED),
        ("1.9", Outcome.EXPIRED),
    ],
)
def test_versions_decide(host: Host, version: str, outcome: Outcome) -> None:
    host.version = version

    @host.patch("core:double", versions=">=1,<2,!=1.7.*", expires=">=1.9,<2")
    def versioned(x, *, by=2):  # type: ignore[no-untyped-def]
        return 0

    session = applied(host, versioned)
    assert session.verdicts["versioned"].outcome is outcome
    assert (host.module("core").double(1) == 0) is outcome.applies


@pytest.mark.parametrize("version", ["2.0", "2.0rc1", "3.1.dev1+gabc"])
def test_a_version_that_was_not_examined_stops_the_start(
    host: Host, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    host.version = version

    @host.patch("core:double")
    def doubled(x, *, by=2):  # type: ignore[no-untyped-def]
        return 0

    with pytest.raises(PatchError) as caught:
        applied(host, doubled)
    message = str(caught.value)
    assert f"it is for vLLM >=1,<2, and whether {version} needs it has not been examined" in message
    assert "the target is the same as in vLLM 1.0" in message
    assert "Install vLLM >=1,<2, or" in message
    assert "set PatchSession.drift to 'warn'" in message
    assert host.module("core").double(1) == 2
    session = applied(host, doubled, drift="warn")
    assert session.verdicts["doubled"].outcome is Outcome.UNEXAMINED
    assert "has not been examined" in caplog.text
    assert host.module("core").double(1) == 0


def test_a_target_that_an_unexamined_version_has_no_more_is_missing_there(host: Host) -> None:
    host.version = "2.0"
    known = {"1.0": host.fingerprint("host_package.core:double")}
    gone = host.patch("core:dubble", fingerprints=known)(lambda x: x)
    with pytest.raises(PatchError, match=r"does not exist in vLLM 2\.0"):
        applied(host, gone, drift="warn")
