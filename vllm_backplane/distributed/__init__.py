"""Coordinates the workers of one engine: the communicator for collectives, and actions of all ranks or none."""
