"""Runs both of vLLM's model runners on a Backplane device, with the decode fast path, step graphs and the sampler."""
