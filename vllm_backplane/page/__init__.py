"""Serves the page of a server: chat with its model, and its status, at ``/``.

It is an endpoint plugin of vLLM. `loading.py` decides when it is loaded, `routes.py` answers requests,
`server_facts.py` and `live_figures.py` collect what the page shows, and `assets/` has the files that a browser gets.
"""
