"""Decides which servers have the page.

vLLM loads an endpoint plugin if VLLM_PLUGINS names it. Once that variable is set, it decides about the plugins of every
other group too, and vLLM takes the name of its resolver of LoRA adapters there as the permission to download. The
command therefore leaves the variable as it is. It adds a middleware to vLLM's command line instead, which attaches the
same plugin when the server's application starts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from vllm_backplane.errors import UsageError
from vllm_backplane.platform_choice import PLUGINS_VARIABLE

ENTRY_POINT = "backplane_page"
"""Name of the entry point. It differs from that of the other plugins of Backplane: VLLM_PLUGINS=backplane asks for the
platform, and opens no paths of the HTTP server."""
MIDDLEWARE = "vllm_backplane.page.plugin.PageLoader"
OPTION = "--no-page"
NOT_LOADED = "Found endpoint plugin(s) %s but VLLM_PLUGINS is not set."
"""Beginning of vLLM's warning."""


def arguments_of_serve(environment: Mapping[str, str], *, wanted: bool) -> list[str]:
    """Returns the arguments of `vllm serve` that add the page.

    There are none if the user does not want it, or has set VLLM_PLUGINS: vLLM then loads the page if it is named.
    """
    return ["--middleware", MIDDLEWARE] if wanted and PLUGINS_VARIABLE not in environment else []


def refuse_named_page(environment: Mapping[str, str]) -> None:
    """Raises UsageError if VLLM_PLUGINS names the page, which the user does not want."""
    allowed = environment.get(PLUGINS_VARIABLE, "")
    if ENTRY_POINT in allowed.split(","):
        raise UsageError(f"{OPTION} contradicts {PLUGINS_VARIABLE}={allowed}; remove {ENTRY_POINT} from the variable")


class _WithoutPage(logging.Filter):
    """Removes the page from vLLM's warning of endpoint plugins that are not loaded, and drops a warning of it alone."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith(NOT_LOADED):
            return True
        match record.args:
            case ([*names],):
                others = [name for name in names if name != ENTRY_POINT]
                record.args = (others,)
                return bool(others)
        return True


_FILTER = _WithoutPage()


def keep_out_of_warning() -> None:
    """Keeps the page out of a warning that vLLM logs whenever an endpoint plugin is installed and VLLM_PLUGINS is not
    set. Who has only installed Backplane has not asked for the page. A second call changes nothing."""
    logging.getLogger("vllm.plugins").addFilter(_FILTER)
