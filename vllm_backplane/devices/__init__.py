"""Holds the devices that ship with Backplane, one folder each.

Each imports only `device/`, `ops/`, `settings/options` and `errors` of this package, as a vendor's wheel would.
"""
