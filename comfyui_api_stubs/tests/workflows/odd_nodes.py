"""Nodes for the headless tests: every kind of input that the editor treats in its own way, and nodes that are slow,
fail, or write files.

It is a node pack of its own (ComfyUI loads it as a custom node), so that the editor's export of it can be recorded.
"""

import os
import time


class OddWidgets:
    """Widgets of every kind, in an order that mixes them with sockets."""

    RETURN_TYPES = ("STRING", "LATENT", "IMAGE")
    FUNCTION = "run"
    CATEGORY = "odd"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "seed": ("INT", {"default": 3, "min": 0, "max": 2**53}),
                "latent": ("LATENT",),
                "plain_seed": ("INT", {"default": 1, "min": 0, "max": 99, "control_after_generate": True}),
                "ratio": ("FLOAT", {"default": 0.5, "min": 0.0, "max": 1.0, "step": 0.01}),
                "flag": ("BOOLEAN", {"default": True}),
                "forced": ("STRING", {"default": "f", "forceInput": True}),
                "text": ("STRING", {"default": "hello", "multiline": True, "dynamicPrompts": True}),
                "choice": (["one", "two", "three"], {"default": "two"}),
                "turning": (["x", "y", "z"], {"control_after_generate": True}),
            },
            "optional": {
                "newer": ("COMBO", {"options": ["p", "q"], "default": "q"}),
                "hidden_socket": ("STRING", {"default": "s", "socketless": True}),
                "image": ("IMAGE",),
                "steps": ("INT", {"default": 7, "min": 1, "max": 10}),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def run(self, seed, latent, plain_seed, ratio, flag, text, choice, turning, forced="", unique_id=None, **more):
        return (f"{seed} {text}", latent, more.get("image"))


class OddPass:
    """Two inputs and two outputs of crossed types, for bypassing."""

    RETURN_TYPES = ("LATENT", "IMAGE")
    FUNCTION = "run"
    CATEGORY = "odd"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"image": ("IMAGE",), "latent": ("LATENT",), "amount": ("FLOAT", {"default": 1.0})}}

    def run(self, image, latent, amount):
        return (latent, image)


class OddSource:
    """A text, a number and a picture."""

    RETURN_TYPES = ("STRING", "INT", "LATENT", "IMAGE")
    FUNCTION = "run"
    CATEGORY = "odd"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {"text": ("STRING", {"default": "t"}), "number": ("INT", {"default": 5, "min": 0, "max": 100})}
        }

    def run(self, text, number):
        return (text, number, {"samples": None}, None)


class OddSink:
    """Takes anything and writes its text into the output folder."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "run"
    CATEGORY = "odd"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {"name": ("STRING", {"default": "note"})},
            "optional": {
                "text": ("STRING", {"forceInput": True}),
                "anything": ("*",),
                "image": ("IMAGE",),
                "latent": ("LATENT",),
            },
        }

    @classmethod
    def VALIDATE_INPUTS(cls, name):
        return True if name.isidentifier() else f"'{name}' is not a plain name"

    def run(self, name, text="", anything=None, image=None, latent=None):
        import folder_paths

        path = os.path.join(folder_paths.get_output_directory(), f"{name}.txt")
        with open(path, "w", encoding="utf-8") as file:
            file.write(str(text))
        return {"ui": {"text": [str(text)], "files": [{"filename": f"{name}.txt", "subfolder": "", "type": "output"}]}}


class OddSlow:
    """Works in small steps until it is done or interrupted; says so in a file beside the outputs."""

    RETURN_TYPES = ("STRING",)
    FUNCTION = "run"
    CATEGORY = "odd"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"steps": ("INT", {"default": 10, "min": 1, "max": 100000})}}

    def run(self, steps):
        import comfy.utils
        import folder_paths

        bar = comfy.utils.ProgressBar(steps)
        done = 0
        try:
            for done in range(1, steps + 1):  # noqa: B007  (read in finally)
                time.sleep(0.01)
                bar.update(1)
        finally:
            with open(os.path.join(folder_paths.get_output_directory(), "saved.txt"), "w", encoding="utf-8") as file:
                file.write(str(done))
        return (str(done),)


class OddFailure:
    """Raises."""

    RETURN_TYPES = ("STRING",)
    FUNCTION = "run"
    CATEGORY = "odd"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"message": ("STRING", {"default": "it broke"})}}

    def run(self, message):
        raise ValueError(message)


NODE_CLASS_MAPPINGS = {cls.__name__: cls for cls in (OddWidgets, OddPass, OddSource, OddSink, OddSlow, OddFailure)}
NODE_DISPLAY_NAME_MAPPINGS = dict(OddWidgets="Odd widgets", OddSink="Odd sink")
