"""Loading the pack beside a running ComfyUI must bring in nothing heavy: whatever only training needs is imported when
it trains.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHILD = """
import asyncio, json, sys
from graft_nodes import comfyui_api_stubs
comfyui_api_stubs.install()
import torch, safetensors.torch, comfy.sd, comfy.samplers, comfy_api.latest, execution, server, nodes
before = set(sys.modules)
assert asyncio.new_event_loop().run_until_complete(nodes.load_custom_node(sys.argv[1]))
assert "TrainStep" in nodes.NODE_CLASS_MAPPINGS
print("NEW", json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before })))
"""


def test_loading_the_pack_imports_no_other_package():
    done = subprocess.run([sys.executable, "-c", CHILD, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    new = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("NEW"))[4:])
    foreign = [
        name for name in new if name not in sys.stdlib_module_names and not name.startswith((str(ROOT), "graft_nodes"))
    ]
    assert foreign == []
