"""Adapts vLLM's configuration to the device, in the stages of `check_and_update_config`: refusals, graphs, scheduling,
memory and loading.
"""
