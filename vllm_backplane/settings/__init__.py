"""Holds what the user and the installed vLLM release give: options, explicit engine arguments, the state that travels
with a vLLM configuration, and the supported releases with their differences.

What Backplane itself sets in a vLLM configuration is in `config/`. `options`, `explicit_arguments` and `releases`
import neither torch nor vLLM; `compat` and `carried_state` are for code that runs inside vLLM.
"""
