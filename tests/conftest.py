"""Opens the host that the tests run against: a real ComfyUI when GRAFT_TEST_COMFYUI names a checkout, else the embedded host."""

import os
import sys

import torch

torch.set_num_threads(int(os.environ.get("GRAFT_TEST_THREADS", "2")))

if "GRAFT_TEST_COMFYUI" in os.environ:
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "with_comfyui"))
    import open_comfyui

    open_comfyui.open_checkout(os.environ["GRAFT_TEST_COMFYUI"])
else:
    from graft_nodes import comfyui_api_stubs

    comfyui_api_stubs.install()
