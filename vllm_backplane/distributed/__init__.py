"""Coordinates the workers of one engine: the communicator for collectives, and actions that all ranks perform or none.
May import `errors` and vLLM.
"""
