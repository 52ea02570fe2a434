"""Shows the start of `vllm-backplane serve` on a terminal, in the place of the log, which goes to a file.

A small process that is forked before vLLM is imported keeps the terminal. It reads the steps of the start from a named
pipe (`process/start_events.py`), and warnings and errors from the log. If it ends, the server does not notice.
"""
