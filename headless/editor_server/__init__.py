"""The server behind `python -m graft_nodes editor`: ComfyUI's own front end on the embedded host, over ComfyUI's HTTP
and WebSocket API.

`serve` starts and ends it; `app` puts the routes together; `guard` and `paths` decide what may be asked for and which
files may be touched; `worker` executes what is queued; `clients` are the open pages. (The translator of the editor's
workflow files is `headless/editor_json.py`.)
"""
