"""A UNet of Stable Diffusion 1.5's size trains in the memory of an ordinary computer."""

import subprocess
import sys

import pytest

CHILD = """
import resource, sys
import torch
from graft_nodes.headless import embedded
embedded.install()
import comfy.sd
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from graft_nodes import host
from graft_nodes.patches.token_downsampling.tokens import ToDoSettings
from graft_nodes.training.trainable.settings import AdapterSettings
from graft_nodes.training.data.dataset import Conditioning, Dataset
from graft_nodes.training.run.loop import train
from graft_nodes.training.optimizers.settings import OptimizerSettings
from graft_nodes.training.state import Settings, Start, begin

with torch.device("meta"):
    shapes = {name: t.shape for name, t in UNetModel(
        image_size=32, in_channels=4, out_channels=4, model_channels=320, num_res_blocks=[2] * 4,
        channel_mult=[1, 2, 4, 4], transformer_depth=[1, 1, 1, 1, 1, 1, 0, 0],
        transformer_depth_output=[1] * 9 + [0] * 3, transformer_depth_middle=1, context_dim=768, num_heads=8,
        num_head_channels=-1, use_spatial_transformer=True, legacy=False, dtype=torch.bfloat16).state_dict().items()}
draws = torch.Generator().manual_seed(0)
weights = {
    name: torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=draws) for name, shape in shapes.items()
}
model = comfy.sd.load_diffusion_model_state_dict(weights, model_options={"dtype": torch.bfloat16})
del weights
assert model.model.diffusion_model.dtype == torch.bfloat16 and model.model.model_config.__class__.__name__ == "SD15"
model = host.token_downsampling.apply_todo(model, ToDoSettings(2.0, 1))[0]
conditionings = {caption: Conditioning(torch.randn(1, 77, 768, generator=draws)) for caption in ("", "a picture")}
dataset = Dataset.from_latents([torch.randn(4, 64, 64, generator=draws)], ["a picture"], conditionings)
start = Start("random", dataset.digest, AdapterSettings(targets="attention+ff"))
state = begin(model.model.diffusion_model, start, Settings(OptimizerSettings(total_steps=2)))
with host.denoiser.open_denoiser(model) as denoiser:
    after = train(state, denoiser, dataset, 2)
moved = [name for name in after.trained if name.endswith("lora_up.weight") and after.trained[name].abs().sum() > 0]
assert len(moved) == len(state.trained) // 2, "a LoRA layer did not train"
assert all(loss == loss for loss in after.history.loss) and after.step == 2
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print("PEAK", peak)
"""


@pytest.mark.long
def test_sd15_trains_two_steps_at_512_px_in_8_gb():
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    peak = int(next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("PEAK")))
    assert peak < 8e9
