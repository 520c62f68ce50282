"""The node API under the number 0.0.2 (ComfyUI's comfy_api.v0_0_2); today the same as the newest."""

from comfy_api.internal.async_to_sync import create_sync_class
from comfy_api.latest import IO, UI, ComfyAPI_latest, ComfyExtension, io, ui
from comfy_api.latest import Input as Input_latest
from comfy_api.latest import InputImpl as InputImpl_latest
from comfy_api.latest import Types as Types_latest


class ComfyAPIAdapter_v0_0_2(ComfyAPI_latest):
    """What a node may ask of ComfyUI while it runs."""

    VERSION = "0.0.2"
    STABLE = False


class Input(Input_latest):
    """Types of values on sockets, for annotations."""


class InputImpl(InputImpl_latest):
    """Values that nodes make."""


class Types(Types_latest):
    """What those values are made of."""


ComfyAPI = ComfyAPIAdapter_v0_0_2
ComfyAPISync = create_sync_class(ComfyAPIAdapter_v0_0_2)

__all__ = ["IO", "UI", "ComfyAPI", "ComfyAPISync", "ComfyExtension", "Input", "InputImpl", "Types", "io", "ui"]
