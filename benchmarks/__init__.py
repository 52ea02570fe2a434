"""Measurements. `make bench` is `benchmarks.compare`; the other files are commands of their own."""
