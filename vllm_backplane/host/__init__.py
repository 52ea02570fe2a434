"""Measures and manages the host of this process: its cores, memory, control groups, and what a fork leaves.

Devices that compute on the host or use its memory import it, a vendor's too. It knows nothing of vLLM.
"""
