"""Holds a conversation with a model through the OpenAI chat API. Imports nothing of vLLM."""
