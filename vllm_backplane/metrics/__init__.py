"""Shows on /metrics what only the workers and the scheduler know: memory, step times, graphs, operators, card errors.

Workers and schedulers write their values to small files (`values_file.py`) in a folder of the server (`folder.py`). The
API server reads the files when it is scraped (`stat_logger.py`), so the values take no part in vLLM's messages between
its processes.
"""
