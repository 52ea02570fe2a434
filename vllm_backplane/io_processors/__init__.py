"""Holds IO processors of vLLM, which turn the data of one request into prompts and the outputs into one answer."""
