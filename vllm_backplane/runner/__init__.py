"""Both of vLLM's model runners on a Backplane device, with the decode fast path, graphs of steps and the sampler.

The worker imports this room. It may import `attention/`, `layers/`, `ops/`, `device/`, `config/` and `settings/`.
"""
