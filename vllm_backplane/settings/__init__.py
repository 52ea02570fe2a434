"""Holds the options, the state that travels with a vLLM configuration, and the supported releases of vLLM.

`options` and `releases` import neither torch nor vLLM; `compat` and `carried_state` are for code that runs inside vLLM.
"""
