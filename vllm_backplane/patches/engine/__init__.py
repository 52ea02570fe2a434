"""Holds the patches that the engine core needs. There is none at present.

The platform and the plugin apply them in every process, right after those of `platform/`: an engine may run in a
process of its own, be forked from another one, or share the process of its caller.
"""
