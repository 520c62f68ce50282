"""A pytest plugin that opens the ComfyUI checkout that GRAFT_TEST_COMFYUI names: for the tests of the embedded host,
which take a ComfyUI that is importable.
"""

import os

import open_comfyui

open_comfyui.open_checkout(os.environ["GRAFT_TEST_COMFYUI"], cpu=os.environ.get("GRAFT_TEST_DEVICE") != "cuda")
