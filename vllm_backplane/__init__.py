"""Backplane is a hardware plugin for vLLM into which any accelerator can be plugged as a device.

vLLM imports this module in every process and calls the entry-point functions below, so they must be fast.
`register_platform` must not raise: vLLM logs an exception of a platform plugin at DEBUG level only and continues with
another platform. Errors are raised later, when vLLM imports the platform class or calls `register_general`, because
they are fatal there.
"""

from __future__ import annotations

__version__ = "0.1.0"


def register_platform() -> str | None:
    """Returns the platform class, or None if another platform serves, as the entry point ``vllm.platform_plugins``."""
    from vllm_backplane.platform_choice import decision

    return "vllm_backplane.platform.BackplanePlatform" if decision().activates else None


def register_general() -> None:
    """Activates the plugin, as the entry point of the group ``vllm.general_plugins``.

    vLLM calls it in every process, sometimes twice.
    """
    from vllm_backplane.page.loading import keep_out_of_warning
    from vllm_backplane.plugin import activate

    keep_out_of_warning()
    activate()


def register_page() -> object:
    """Returns the endpoint plugin of the page, as the entry point of the group ``vllm.endpoint_plugins``.

    vLLM calls it in a server if VLLM_PLUGINS names it. If another platform serves, the plugin adds nothing.
    """
    from vllm_backplane.page.plugin import PagePlugin

    return PagePlugin()


def register_documents() -> str | None:
    """Returns the IO processor for long documents, as an entry point of the group ``vllm.io_processor_plugins``.

    vLLM calls it when a server was asked for an IO processor. It returns None if another platform serves.
    """
    from vllm.platforms import current_platform

    if not getattr(type(current_platform), "is_backplane", False):
        return None
    return "vllm_backplane.io_processors.documents.DocumentProcessor"
