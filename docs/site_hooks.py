"""Connects the documentation site to files of the repository that are not pages. mkdocs.yml names this file as a hook.

Pages link to tests, sources and plots by relative paths, which work wherever the repository itself is browsed. On the
site, plots are copied beside the pages, and every other link that leaves the documentation leads to the repository.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "benchmarks/results"
PLOTS = "plots"
"""Folder of the site that has the plots."""

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the plots of the benchmark results."""
    for plot in sorted((ROOT / RESULTS).glob("*/*.svg")):
        name = f"{PLOTS}/{plot.parent.name}/{plot.name}"
        files.append(File.generated(config, name, abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrites links that leave the folder of the documentation."""
    folder = Path(page.file.src_uri).parent

    def rewrite(match: re.Match[str]) -> str:
        image, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = os.path.normpath(Path("docs") / folder / target)
        if path.startswith("docs/"):
            return match[0]
        if image:
            shown = f"{PLOTS}/{Path(path).relative_to(RESULTS)}"
            return f"![{text}]({os.path.relpath(shown, folder)})"
        return f"[{text}]({config.extra['repository']}/blob/main/{path}{anchor})"

    # Code blocks keep their text.
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _LINK.sub(rewrite, part) for part in parts)
