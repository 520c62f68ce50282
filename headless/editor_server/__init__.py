"""The server of `python -m graft_nodes editor`: runs ComfyUI's front end on the embedded host, through ComfyUI's HTTP
and WebSocket API.

`serve` starts and stops it, `app` collects the routes, `guard` refuses requests from other sites, `paths` checks file
names, `worker` runs the queued workflows, and `clients` holds the open pages. (`headless/editor_json.py` translates the
editor's workflow files.)
"""
