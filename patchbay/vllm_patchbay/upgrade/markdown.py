"""Renders the tasks of an upgrade as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_patchbay.upgrade.items import Item, Section, Upgrade

_MOST_PLACES = 6
_NOTHING = {
    Section.BREAKS: "Nothing was found. What the source does not show, such as a changed meaning, is below or unseen.",
    Section.MAY_GO: "None: no patch has expired, no declared condition is met, no change of a target has lines of its "
    "replacement, and no new source mentions an upstream issue.",
}


def as_markdown(report: Upgrade, *, diffs: bool = True) -> str:
    """Returns the report as a page of tasks."""
    return "\n".join(_lines(report, diffs)) + "\n"


def _lines(report: Upgrade, diffs: bool) -> Iterator[str]:
    yield f"# {report.path}: from vLLM {report.before} to {report.after}"
    yield ""
    yield "| section | tasks |"
    yield "| --- | ---: |"
    for section in Section:
        yield f"| {section.value} | {len(report.of(section))} |"
    for section in Section:
        yield from ("", f"## {section.value}", "")
        items = report.of(section)
        if not items:
            yield _NOTHING.get(section, "None.")
        for item in items:
            yield from _task(item, diffs)


def _task(item: Item, diffs: bool) -> Iterator[str]:
    places = ", ".join(item.places[:_MOST_PLACES])
    if len(item.places) > _MOST_PLACES:
        places += f" and {len(item.places) - _MOST_PLACES} more"
    subject = f"`{item.subject}`" if " " not in item.subject else f"{item.subject};"
    yield f"- [ ] {subject} {item.what}" + (f" — {places}" if places else "")
    if item.diff and diffs:
        yield from ("", "  ```diff", *(f"  {line.removeprefix('  ')}" for line in item.diff.splitlines()), "  ```", "")
