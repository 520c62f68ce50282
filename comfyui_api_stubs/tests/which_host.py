"""Which host the tests run on: a ComfyUI, when one was put on the path before, else the embedded host."""

import sys

import comfyui_api_stubs

REAL = comfyui_api_stubs.MODULES not in sys.path
