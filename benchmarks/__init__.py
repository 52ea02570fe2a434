"""Contains the benchmarks: `make bench` runs `benchmarks.compare`, and every other file is a separate program."""
