"""What nodes import as `io`: the names of _io that stay."""

from comfy_api.latest._io import *  # noqa: F403
