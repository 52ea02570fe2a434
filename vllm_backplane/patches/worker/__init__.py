"""Holds the patches for the processes that run the model. The worker applies them when it starts. There is none at
present.
"""
