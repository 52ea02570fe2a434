"""Loads model weights and checks them: load formats that share weights between processes or fetch them from a running
server, the size of a checkpoint, missing weights, and whether weights can be saved.
"""
