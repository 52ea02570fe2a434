"""The stages of `check_and_update_config`: refusals, graphs, scheduling, memory and loading.

The platform, the runner, the worker and `lora/` import this room. It may import `device/`, `settings/`, `kv_offload/`,
`weights/` and `quantization/`.
"""
