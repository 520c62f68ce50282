"""The node API under the number 0.0.1 (ComfyUI's comfy_api.v0_0_1); a template of its authors, without nodes."""

from comfy_api.internal.async_to_sync import create_sync_class
from comfy_api.v0_0_2 import ComfyAPIAdapter_v0_0_2
from comfy_api.v0_0_2 import Input as Input_v0_0_2
from comfy_api.v0_0_2 import InputImpl as InputImpl_v0_0_2
from comfy_api.v0_0_2 import Types as Types_v0_0_2


class ComfyAPIAdapter_v0_0_1(ComfyAPIAdapter_v0_0_2):
    """What a node may ask of ComfyUI while it runs."""

    VERSION = "0.0.1"
    STABLE = True


class Input(Input_v0_0_2):
    """Types of values on sockets, for annotations."""


class InputImpl(InputImpl_v0_0_2):
    """Values that nodes make."""


class Types(Types_v0_0_2):
    """What those values are made of."""


ComfyAPI = ComfyAPIAdapter_v0_0_1
ComfyAPISync = create_sync_class(ComfyAPIAdapter_v0_0_1)

__all__ = ["ComfyAPI", "ComfyAPISync", "Input", "InputImpl", "Types"]
