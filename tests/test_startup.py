"""Loading the pack beside a running ComfyUI must bring in nothing heavy: whatever only training needs is imported when
it trains.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHILD = """
import asyncio, json, sys
from graft_nodes.headless import embedded
embedded.install()
import torch, comfy.sd, comfy.samplers, comfy_api.latest, execution, server, nodes
before = set(sys.modules)
assert asyncio.new_event_loop().run_until_complete(nodes.load_custom_node(sys.argv[1]))
assert "TrainStep" in nodes.NODE_CLASS_MAPPINGS
print("NEW", json.dumps(sorted(set(sys.modules) - before)))
"""
MOST_MODULES = 144  # of Graft; each costs about a millisecond
HEAVY = re.compile(
    r"(yaml|numpy\.testing|PIL\.\w+ImagePlugin|PIL\.Image|safetensors\.torch|aiohttp|tensorboard|bitsandbytes"
    r"|torch\.(distributed\.(fsdp|tensor)|utils\.tensorboard|_dynamo|_inductor|onnx|testing))(\.|$)"
)
DECLARED = (  # settings, which are the inputs of nodes, and what they list
    "patches.models.convolution",
    "patches.token_downsampling.tokens",
    "patches.token_routing",
    "patches.token_routing.settings",
    "training.averages",
    "training.averages.settings",
)
NOT_YET = (  # Graft's own that only a running node needs
    "demo",
    "ema.shadow",
    "host.autograd_inplace",
    "host.base_weights",
    "host.denoiser",
    "host.encoding",
    "host.fingerprint",
    "host.latents",
    "host.lora_stacks",
    "host.model_",
    "host.previews",
    "host.token_",
    "patches.analysis",
    "patches.lora_files.block_weights",
    "patches.lora_files.entry",
    "patches.lora_files.open_file",
    "patches.lora_files.parse",
    "patches.lora_files.read_stack",
    "patches.lora_files.save",
    "patches.models.",
    "patches.patching",
    "patches.token_downsampling.",
    "patches.token_routing",
    "storage.atomic",
    "storage.pictures",
    "storage.safetensors",
    "training.data.dataset",
    "training.run",
    "training.store.store",
    "training.state",
    "training.trainable.install",
    "training.averages",
    "training.reports",
    "training.distributed",
    "headless",
)


@pytest.fixture(scope="module")
def new_modules():
    done = subprocess.run([sys.executable, "-c", CHILD, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("NEW"))[4:])


def own(modules):
    """Graft's modules by their names inside the pack."""
    return [name.removeprefix(f"{ROOT}.") for name in modules if name.startswith(f"{ROOT}.")]


def test_loading_the_pack_imports_no_other_package(new_modules):
    names = {name.split(".")[0] for name in new_modules if not name.startswith(str(ROOT))}
    foreign = [name for name in names if name not in sys.stdlib_module_names and not name.startswith("graft_nodes")]
    assert foreign == []


def test_loading_the_pack_imports_nothing_heavy(new_modules):
    assert not [name for name in new_modules if HEAVY.match(name)]


def test_loading_the_pack_imports_few_modules_of_graft(new_modules):
    modules = own(new_modules)
    assert 100 < len(modules) <= MOST_MODULES, len(modules)
    early = [name for name in modules if name.startswith(NOT_YET) and name not in DECLARED]
    assert not early, "import it where it is needed, inside the function"
