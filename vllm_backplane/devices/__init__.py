"""The devices that ship with Backplane.

Each imports `device/`, `ops/` and `options` alone, as a vendor's wheel would.
"""
