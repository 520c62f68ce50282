"""The embedded host: the part of ComfyUI's API that Graft uses, under ComfyUI's own module names, for running without
it.
"""

import importlib.util
import os
import sys

MODULES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "modules")


def install() -> bool:
    """Put the embedded host's modules on the path unless a ComfyUI is importable; True when the embedded host is the
    one in use.
    """
    if MODULES in sys.path:
        return True
    if importlib.util.find_spec("comfy") is not None:
        return False
    sys.path.insert(0, MODULES)
    return True
