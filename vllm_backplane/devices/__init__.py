"""Holds the devices that ship with Backplane, one folder each.

Each imports only `device/`, `ops/`, `settings/options` and `errors` of this package, as a vendor's wheel would.
"""

ON_HOST_MEMORY = frozenset({"cpu", "sim"})
"""The devices whose memory is the host's. Their modules import torch, and this one does not."""
