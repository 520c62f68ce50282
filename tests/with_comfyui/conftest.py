"""Keeps checks/ out of an ordinary run: they need a real ComfyUI, which test_real_comfyui.py starts in a process of its
own.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "editor")]

collect_ignore = [] if "GRAFT_TEST_COMFYUI" in os.environ else ["checks"]
if "GRAFT_TEST_COMFYUI" in os.environ:
    collect_ignore += ["test_first_lora.py", "test_real_comfyui.py"]
