"""Reports in one run what a new vLLM release asks of a plugin: what breaks, what changed beneath it, what is new.

`plugin_changes` finds what breaks and what changed under the plugin's overrides, patches and guards.
`hooks` and `settings` find what is new: hooks, environment variables and configuration fields. `markdown` renders all
as a list of tasks.
Everything is read from source; neither the plugin nor vLLM is imported.
"""

from vllm_patchbay.upgrade.items import Item, Section, Upgrade
from vllm_patchbay.upgrade.run import upgrade

__all__ = ["Item", "Section", "Upgrade", "upgrade"]
