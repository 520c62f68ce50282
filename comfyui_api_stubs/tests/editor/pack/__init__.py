"""A node pack with everything that a pack can bring to the editor."""

import time

import comfy.cli_args
import comfy.model_management
import comfy.utils
import torch
from PIL import Image

WEB_DIRECTORY = "./web"


class PackSteps:
    """Takes some steps, each with a preview, and gives the last picture."""

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "run"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"steps": ("INT", {"default": 3, "min": 1}), "seed": ("INT", {"default": 0})}}

    def run(self, steps, seed):
        bar = comfy.utils.ProgressBar(steps)
        for step in range(steps):
            comfy.model_management.throw_exception_if_processing_interrupted()
            time.sleep(0.02)
            shown = None
            if comfy.cli_args.args.preview_method != comfy.cli_args.LatentPreviewMethod.NoPreviews:
                shown = ("JPEG", Image.new("RGB", (64, 64), (seed * 37 % 256, step % 256, 128)), 512)
            bar.update_absolute(step + 1, steps, shown)
        return (torch.full((1, 8, 8, 3), (seed % 256) / 255),)


NODE_CLASS_MAPPINGS = {cls.__name__: cls for cls in (PackSteps,)}
NODE_DISPLAY_NAME_MAPPINGS = {cls.__name__: "Steps" for cls in (PackSteps,)}
