"""The server of the graph editor: runs ComfyUI's front end on an open host, through ComfyUI's HTTP and WebSocket API.

`serve` starts and stops it, `app` collects the routes, `guard` refuses requests from other sites, `paths` checks file
names, `disk` writes files, `worker` runs the queued workflows, and `clients` holds the open pages.
"""
