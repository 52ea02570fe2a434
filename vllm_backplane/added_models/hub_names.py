"""Parses names of models on a hub: ``user/repository:Q4_K_M``, ``:file.gguf`` or ``@revision``."""

from __future__ import annotations

import re
from dataclasses import dataclass

_HUB_NAME = re.compile(
    r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(?::(?P<selector>[^@:\s]+))?(?:@(?P<revision>[^@:\s]+))?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class HubName:
    """Names a model on a hub."""

    repository: str
    selector: str
    """A quantization, or a GGUF file of the repository; an empty string for a safetensors repository."""
    revision: str

    @property
    def is_gguf(self) -> bool:
        return bool(self.selector)

    def __str__(self) -> str:
        selector = f":{self.selector}" if self.selector else ""
        return f"{self.repository}{selector}" + (f"@{self.revision}" if self.revision else "")


def parse(given: str) -> HubName | None:
    """Returns the parts of a name on a hub, or None if this is no such name."""
    match = _HUB_NAME.fullmatch(given)
    return HubName(match["repository"], match["selector"] or "", match["revision"] or "") if match else None
