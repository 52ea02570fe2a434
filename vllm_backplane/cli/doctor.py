"""Report whether serving would work here, on which device, and what is wrong.

Examines Python, torch, vLLM and its plugins, options, devices, operators and the layers that use them, and lets vLLM
choose its platform in a subprocess. Changes nothing. Exits with 0 if serving would work, even with warnings.

With --full, vLLM is imported as far as a server imports it, and every layer is bound to its replacement. This takes
about three times as long.

With --json, the keys are: backplane, full, serves, software, environment, plugins, options, devices, chosen, operators,
platform, bindings, findings.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm_backplane.cli import _output

if TYPE_CHECKING:
    from vllm_backplane.doctor.findings import Finding
    from vllm_backplane.doctor.options import OptionInfo
    from vllm_backplane.doctor.report import Report

NAME = "doctor"
HELP = "report whether serving would work here, and what is wrong if not"

WIDTH = 100
_INDENT = "  "


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--additional-config", metavar="JSON", help="also check options as they would be given to 'vllm serve'"
    )
    parser.add_argument(
        "--full", action="store_true", help="also import everything that a server imports, and bind every layer"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="list every option, also those with their defaults, operator and layer"
    )
    _output.add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from vllm_backplane.doctor.report import examine  # late: the checks are many modules

    report = examine(args.additional_config, full=args.full)
    if args.json:
        _output.print_json(dataclasses.asdict(report))
    else:
        print("\n".join(render(report, verbose=args.verbose)))
    return 0 if report.serves else 1


def render(report: Report, *, verbose: bool = False) -> Iterable[str]:
    """Yields the lines of the text report."""
    yield f"vllm-backplane {report.backplane or '(not installed)'}"
    yield from _section(
        "Software",
        [
            (part.mark, part.name, part.version or "none", _join(part.distribution, part.note))
            for part in report.software
        ],
    )
    yield from _section(
        "Plugins",
        [
            (plugin.mark, plugin.name, plugin.distribution, plugin.group, _join(plugin.state, plugin.note))
            for plugin in report.plugins
        ],
    )
    yield _INDENT + report.environment.plugin_filter
    yield from _options(report, verbose)
    yield from _devices(report)
    yield from _operators(report, verbose)
    yield from _vllm(report, verbose)
    yield from _findings(report.findings)
    yield ""
    yield verdict(report)


def verdict(report: Report) -> str:
    count = Counter(finding.severity for finding in report.findings)
    listed = ", ".join(f"{number} {name}{'s' * (number > 1)}" for name, number in sorted(count.items()))
    if not report.serves:
        return f"Serving would not work: {listed}."
    on = f" on device {report.chosen.name}" if report.chosen else ""
    return f"Serving would work{on}" + (f": {listed}." if listed else ".")


def _options(report: Report, verbose: bool) -> Iterable[str]:
    shown = [option for option in report.options if verbose or option.source != "default"]
    yield from _section(
        "Options",
        [
            ("-", option.variable, option.path, "default" if option.source == "default" else _given(option))
            for option in shown
        ],
    )
    if not verbose and (others := len(report.options) - len(shown)):
        yield f"{_INDENT}{others} options have their defaults (--verbose lists them)"
    if verbose:
        for option in report.options:
            yield from _wrapped(f"{option.variable}: {option.help}", _INDENT, _INDENT * 3)


def _devices(report: Report) -> Iterable[str]:
    yield from _section(
        "Devices",
        [
            (
                device.mark,
                device.name,
                device.distribution,
                f"available, {device.count} card{'s' * (device.count > 1)}"
                if device.available
                else "; ".join(filter(None, (device.reason, device.remedy))),
            )
            for device in report.devices
        ],
    )
    chosen = report.chosen
    if chosen is None:
        yield f"{_INDENT}no device would be used"
        return
    yield f"{_INDENT}{chosen.name} would be used: {chosen.reason}"
    if chosen.card:
        yield (
            f"{_INDENT}{chosen.card}, {chosen.compute_units} compute unit{'s' * (chosen.compute_units != 1)}, "
            f"{_gib(chosen.memory_free)} of {_gib(chosen.memory_total)} free"
        )


def _operators(report: Report, verbose: bool) -> Iterable[str]:
    count = Counter(
        (line.implementation, line.provider if line.implementation == "kernel" else "plain PyTorch")
        for line in report.operators
    )
    yield from _section(
        "Operators",
        [("-", f"{number} by {how}", provider) for (how, provider), number in sorted(count.items())],
    )
    if not report.operators:
        yield f"{_INDENT}unknown: no device was started"
    if verbose:
        yield from _table([("", line.operator, line.implementation, line.provider) for line in report.operators])


def _vllm(report: Report, verbose: bool) -> Iterable[str]:
    platform = ": ".join(filter(None, (report.platform.name or "none", report.platform.reason)))
    rows: list[tuple[str, ...]] = [(report.platform.mark, "platform", platform)]
    how = "bound" if report.full else "found in vLLM's source"
    are_sound = all(binding.mark == "ok" for binding in report.bindings)
    if are_sound and report.bindings and not verbose:
        rows.append(("ok", "layers, hooks", f"all {len(report.bindings)} {how}"))
    else:
        for kind in dict.fromkeys(binding.kind for binding in report.bindings):
            of_kind = [binding for binding in report.bindings if binding.kind == kind]
            bound = sum(binding.mark == "ok" for binding in of_kind)
            rows.append(("ok" if bound == len(of_kind) else "error", kind, f"{bound} of {len(of_kind)} {how}"))
    if not report.bindings:
        rows.append(("-", "layers", "not checked: the platform is not Backplane's"))
    yield from _section("vLLM", rows)
    if verbose:
        yield from _table(
            [(binding.mark, binding.upstream.partition(":")[2], binding.replacement) for binding in report.bindings]
        )


def _findings(findings: Sequence[Finding]) -> Iterable[str]:
    if not findings:
        return
    yield ""
    yield "Problems"
    for finding in findings:
        mark = f"{_INDENT}{finding.severity}: "
        yield from _wrapped(finding.what, mark, _INDENT * 3)
        yield from _wrapped(finding.remedy, _INDENT * 3 + "remedy: ", _INDENT * 5)


def _section(title: str, rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    yield ""
    yield title
    yield from _table(rows)


def _table(rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    """Yields aligned lines. The first cell of a row is its mark, and the last cell is wrapped."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    if widths:
        widths[0] = len("warning")
    for row in rows:
        head = _INDENT + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  "
        yield from _wrapped(row[-1], head, " " * min(len(head), WIDTH // 2))


def _wrapped(text: str, first: str, following: str) -> Iterable[str]:
    lines = textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=following, break_long_words=False, break_on_hyphens=False
    )
    return [line.rstrip() for line in lines] or [first.rstrip()]


def _join(text: str, note: str) -> str:
    return f"{text} ({note})" if text and note else text or note


def _given(option: OptionInfo) -> str:
    value = option.value if isinstance(option.value, str) else json.dumps(option.value)
    return value if option.source == option.variable else f"{value} ({option.source})"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
