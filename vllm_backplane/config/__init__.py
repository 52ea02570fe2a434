"""Sets what the device needs in vLLM's `VllmConfig`, in the stages of `check_and_update_config`: refusals, chat
templates, graphs, scheduling, memory and loading.

What the user and the installed vLLM release give is in `settings/`.
"""
