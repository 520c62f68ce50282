"""What nodes import as `ui`: the names of _ui that stay."""

from comfy_api.latest._ui import *  # noqa: F403
