"""The versions of the node API, newest first (ComfyUI's comfy_api.version_list)."""

from comfy_api.internal import ComfyAPIBase
from comfy_api.latest import ComfyAPI_latest
from comfy_api.v0_0_1 import ComfyAPIAdapter_v0_0_1
from comfy_api.v0_0_2 import ComfyAPIAdapter_v0_0_2

supported_versions: list[type[ComfyAPIBase]] = [ComfyAPI_latest, ComfyAPIAdapter_v0_0_2, ComfyAPIAdapter_v0_0_1]
