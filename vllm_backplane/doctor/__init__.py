"""Examines the installation and what vLLM would do with it, for `vllm-backplane doctor`.

Checks return values, and `cli/doctor.py` prints them. Importing this package imports neither torch nor vLLM, because a
broken installation of either must be reported too.
`report` runs all checks. It is not imported here, because `serve` uses single ones.
"""
