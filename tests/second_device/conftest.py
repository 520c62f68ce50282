"""Keeps checks/ and dynamic/ out of an ordinary run: they need the second device, which test_second_device.py brings in
a process of its own, and dynamic/ a real ComfyUI's dynamic VRAM on it.
"""

import os

collect_ignore = []
if os.environ.get("GRAFT_TEST_DYNAMIC") != "1":
    collect_ignore.append("dynamic")
if os.environ.get("GRAFT_TEST_DEVICE") == "second":
    collect_ignore += ["test_second_device.py", "test_text_encoder_on_the_cpu.py"]
else:
    collect_ignore.append("checks")
