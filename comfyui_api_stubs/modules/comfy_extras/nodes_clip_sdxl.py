"""CLIP Text Encode (SDXL): a text for each of SDXL's two text encoders, and the sizes that SDXL was trained with."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

LARGEST = 16384  # pixels
ENCODERS = ("g", "l")  # CLIP-G and CLIP-L


def _size(name: str, default: int) -> Any:
    return io.Int.Input(name, default=default, min=0, max=LARGEST)


class CLIPTextEncodeSDXL(io.ComfyNode):
    """Encodes one text with CLIP-G and one with CLIP-L."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "CLIPTextEncodeSDXL",
            display_name="CLIP Text Encode (SDXL)",
            category="conditioning",
            inputs=[
                io.Clip.Input("clip"),
                _size("width", 1024),
                _size("height", 1024),
                _size("crop_w", 0),
                _size("crop_h", 0),
                _size("target_width", 1024),
                _size("target_height", 1024),
                io.String.Input("text_g", multiline=True, dynamic_prompts=True),
                io.String.Input("text_l", multiline=True, dynamic_prompts=True),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(
        cls,
        clip: Any,
        width: int,
        height: int,
        crop_w: int,
        crop_h: int,
        target_width: int,
        target_height: int,
        text_g: str,
        text_l: str,
    ) -> io.NodeOutput:
        chunks = {"g": clip.tokenize(text_g), "l": clip.tokenize(text_l)}
        empty = clip.tokenize("")
        missing = [name for name in ENCODERS if name not in empty]
        if missing:
            raise ValueError(f"this node needs SDXL's two text encoders, and the CLIP has no CLIP-{missing[0].upper()}")
        tokens = {**chunks["g"], **{name: list(chunks[name][name]) for name in ENCODERS}}
        longest = max(len(tokens[name]) for name in ENCODERS)
        for name in ENCODERS:  # both need as many chunks
            tokens[name] += empty[name] * (longest - len(tokens[name]))
        sizes = {"width": width, "height": height, "crop_w": crop_w, "crop_h": crop_h}
        sizes |= {"target_width": target_width, "target_height": target_height}
        return io.NodeOutput(clip.encode_from_tokens_scheduled(tokens, add_dict=sizes))
