"""Defines the result of comparing two releases for a plugin: tasks, by section."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Section(Enum):
    """Names the sections of the report, in their order."""

    BREAKS = "Breaks for certain"
    CHANGED = "Changed beneath the plugin: read each difference"
    MAY_GO = "Patches that may go"
    HOOKS = "New hooks of classes that the plugin extends"
    SETTINGS = "New and removed settings: decide about each"


@dataclass(frozen=True, slots=True)
class Item:
    """Describes one task."""

    section: Section
    subject: str
    """What of vLLM, or of the plugin, the task is about."""
    what: str
    """What happened to it, and what to do."""
    places: tuple[str, ...] = ()
    """Places in the plugin, as FILE:LINE."""
    diff: str = ""


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Holds the tasks of an upgrade from one vLLM to another."""

    path: str
    before: str
    after: str
    items: tuple[Item, ...]

    def of(self, section: Section) -> list[Item]:
        """Returns the tasks of a section."""
        return [item for item in self.items if item.section is section]

    @property
    def breaks(self) -> bool:
        """Returns whether something breaks for certain."""
        return bool(self.of(Section.BREAKS))
