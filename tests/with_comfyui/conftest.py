"""Keeps checks/ out of an ordinary run: they need a real ComfyUI, which test_real_comfyui.py starts in a process of its
own.
"""

import os

collect_ignore = [] if "GRAFT_TEST_COMFYUI" in os.environ else ["checks"]
if "GRAFT_TEST_COMFYUI" in os.environ:
    collect_ignore.append("test_real_comfyui.py")
