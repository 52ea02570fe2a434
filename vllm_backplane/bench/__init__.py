"""Measures the speed of this machine with one model, for `vllm-backplane bench`."""
