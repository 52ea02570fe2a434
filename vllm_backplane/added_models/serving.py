"""Returns the path to serve for the name of an added model, or for the name of a GGUF file on a hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vllm_backplane.added_models import entries, hub_names
from vllm_backplane.added_models.hub_names import HubName
from vllm_backplane.added_models.progress import Progress


def is_served_by_name(given: str) -> bool:
    """Returns whether `path_to_serve` has a path for the name, or downloads one."""
    return entries.lookup(given) is not None or _gguf_of_hub(given) is not None


def path_to_serve(given: str, report: Callable[[str], None]) -> Path | None:
    """Returns the path of an added model, or None if the name is that of no added model.

    A GGUF file of a hub is downloaded and added first. Other names of the hub are left to vLLM, which downloads them.
    """
    progress = Progress(report)
    entry = entries.lookup(given)
    if entry is not None:
        entry.require_complete(progress)
        return entry.path
    hub_name = _gguf_of_hub(given)
    if hub_name is None:
        return None
    # Imported here, because it imports the parsers of model files.
    from vllm_backplane.added_models import hub

    return hub.add_from_hub(hub_name, None, replace=False, progress=progress).path


def _gguf_of_hub(given: str) -> HubName | None:
    hub_name = hub_names.parse(given)
    return None if hub_name is None or not hub_name.is_gguf or Path(given).exists() else hub_name
