"""The node for sliders: prompts or pairs of pictures in, a dataset that trains a direction out."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .. import host
from .refusals import refusal
from .schema import Dataset, GraftNode, advanced, aliases

# The names of training/objective/slider.py, which only a run imports.
METHODS = ("both directions", "concept sliders", "picture pairs", "ai-toolkit")


class GraftSlider(GraftNode):
    """Makes a dataset that trains a slider."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftSlider",
            display_name="Slider",
            category="Graft/training",
            description=(
                "Trains a LoRA as a slider: a strength above 0 moves a property one way, below 0 the other way. From"
                " prompts alone, without pictures, or from pairs of pictures. Connect it to Start Training as dataset."
            ),
            **aliases("concept slider", "slider lora", "direction", "leco", "image slider", "attribute"),
            inputs=[
                io.Combo.Input(
                    "method",
                    display_name="slider method",
                    options=list(METHODS),
                    default=METHODS[0],
                    tooltip=(
                        "both directions: strengths 1 and -1 are trained in each step. concept sliders: strength 1"
                        " alone, as in the paper, in half the time. picture pairs: strength 1 learns one picture, -1"
                        " the other; no prompts are used. ai-toolkit: both directions with AI-Toolkit's targets, which"
                        " get the mean and the deviation of the model's own prediction. Take it if strength 1 burns"
                        " images."
                    ),
                ),
                io.String.Input(
                    "positive",
                    display_name="positive prompt",
                    default="",
                    multiline=True,
                    tooltip=(
                        "What strength 1 moves towards: a very old person. Several lines are several pairs, each with"
                        " the same line of negative and target."
                    ),
                ),
                io.String.Input(
                    "negative",
                    display_name="negative prompt",
                    default="",
                    multiline=True,
                    tooltip="What strength -1 moves towards: a very young person. Empty is the empty prompt.",
                ),
                io.String.Input(
                    "target",
                    display_name="target prompt",
                    default="",
                    multiline=True,
                    tooltip="What the slider is for, with nothing of the property in it: a person.",
                ),
                advanced(
                    io.String,
                    "neutral",
                    display_name="neutral prompt",
                    default="",
                    multiline=True,
                    tooltip="What the model starts from. Empty is the target prompt, which is usual.",
                ),
                advanced(
                    io.String,
                    "keep",
                    display_name="words to keep",
                    default="",
                    multiline=True,
                    tooltip=(
                        "What the slider must not change, one on each line: male, then female. Each is written in front"
                        " of all prompts in turn."
                    ),
                ),
                io.Float.Input(
                    "guidance",
                    display_name="guidance",
                    default=3.0,
                    min=0.01,
                    max=100.0,
                    step=0.1,
                    tooltip=(
                        "How far strength 1 goes: by how many times the difference between the two prompts. Lower it if"
                        " strength 1 is too much already."
                    ),
                ),
                io.Int.Input(
                    "width",
                    display_name="width",
                    default=512,
                    min=16,
                    max=16384,
                    step=8,
                    tooltip="Without pictures: the width that is trained. Take one that the model was trained on.",
                ),
                io.Int.Input(
                    "height",
                    display_name="height",
                    default=512,
                    min=16,
                    max=16384,
                    step=8,
                    tooltip="Without pictures: the height that is trained.",
                ),
                advanced(
                    io.Int,
                    "steps",
                    display_name="denoising steps",
                    default=20,
                    min=1,
                    max=1000,
                    tooltip=(
                        "Without pictures: noise is denoised down to the noise level that is trained, in so many steps"
                        " for the whole way. Lower it to train faster."
                    ),
                ),
                advanced(
                    io.Float,
                    "cfg",
                    display_name="denoising CFG",
                    default=3.0,
                    min=1.0,
                    max=100.0,
                    step=0.1,
                    tooltip="The CFG of these steps. 1 takes half the time, and is right for distilled models.",
                ),
                io.Clip.Input("clip", optional=True, tooltip="Encodes the prompts. Picture pairs need none."),
                io.Vae.Input("vae", optional=True, tooltip="Without pictures: tells the shape of the latents."),
                Dataset.Input(
                    "dataset",
                    optional=True,
                    tooltip=(
                        "From Dataset. For prompts optional: its pictures are trained on in place of noise, without"
                        " their captions. For picture pairs: name.win.png for strength 1 with name.lose.png for -1, or"
                        " pictures with a control picture each as reference latents."
                    ),
                ),
                advanced(
                    io.String,
                    "anchor",
                    display_name="anchor prompt",
                    default="",
                    multiline=True,
                    optional=True,
                    tooltip=(
                        "What the slider must leave as it is: a person, for a slider of a woman. The adapter is trained"
                        " to predict for it what the model predicts without it. Empty is no anchor, which is faster."
                    ),
                ),
                advanced(
                    io.Float,
                    "anchor_strength",
                    display_name="anchor strength",
                    default=1.0,
                    min=0.01,
                    max=100.0,
                    step=0.1,
                    optional=True,
                    tooltip="How much the anchor counts. Raise it if what the anchor names changes all the same.",
                ),
            ],
            outputs=[Dataset.Output(display_name="GRAFT_DATASET"), io.String.Output(display_name="report")],
        )

    @classmethod
    def validate_inputs(
        cls,
        method=None,
        positive=None,
        negative=None,
        target=None,
        neutral=None,
        keep=None,
        guidance=None,
        steps=None,
        cfg=None,
        anchor="",
        anchor_strength=1.0,
    ) -> bool | str:
        from ..training.objective.slider import SliderSettings

        return refusal(
            cls,
            SliderSettings.read,
            method=method,
            positive=positive,
            negative=negative,
            target=target,
            neutral=neutral,
            keep=keep,
            guidance=guidance,
            steps=steps,
            cfg=cfg,
            anchor=anchor,
            anchor_strength=anchor_strength,
        )

    @classmethod
    def execute(
        cls,
        method=METHODS[0],
        positive="",
        negative="",
        target="",
        neutral="",
        keep="",
        guidance=3.0,
        width=512,
        height=512,
        steps=20,
        cfg=3.0,
        clip=None,
        vae=None,
        dataset=None,
        anchor="",
        anchor_strength=1.0,
    ) -> io.NodeOutput:
        from ..training.data import sliders
        from ..training.objective.slider import SliderSettings

        texts = positive, negative, target, neutral, keep, anchor
        values = {"guidance": guidance, "steps": steps, "cfg": cfg, "anchor_strength": anchor_strength}
        settings = SliderSettings.read(method, *texts, **values)
        if settings.takes_prompts:
            made = _of_prompts(settings, clip, vae, dataset, (width, height))
        else:
            made = _of_pairs(settings, dataset)
        report = "\n".join(sliders.said(made))
        return io.NodeOutput(made, report, ui={"text": [report]})


def _of_prompts(settings: Any, clip: Any, vae: Any, dataset: Any, size: tuple[int, int]) -> Any:
    """The dataset of a slider between prompts: of the pictures that are connected, or of noise."""
    import torch

    from ..training.data import sliders

    if clip is None:
        raise ValueError(
            f"Slider: slider method {settings.method} needs prompts, and no CLIP is connected. Connect the model's"
            " CLIP; for a model without a text encoder, choose picture pairs."
        )
    if dataset is None and vae is None:
        raise ValueError("Slider: connect VAE, which tells the shape of the latents, or a dataset of pictures.")
    clip_hash = host.fingerprint.fingerprint_of(clip, "clip")
    skip, weighted = 0, False
    if dataset is not None:
        skip, weighted = dataset.clip_skip, dataset.weighted_captions
    conditionings = host.encoding.encode_captions(clip, sliders.texts(settings), skip, weighted)
    if dataset is not None:
        return sliders.of_pictures(settings, dataset, conditionings, clip_hash)
    vae_hash = host.fingerprint.fingerprint_of(vae, "vae")
    width, height = size
    latent = host.encoding.encode_pictures(vae, torch.zeros(1, height, width, 3))[0]
    hashes = vae_hash.digest, f"{clip_hash.digest} 0"
    unhashed = vae_hash.unhashed + clip_hash.unhashed
    return sliders.of_noise(settings, latent, size, conditionings, hashes, unhashed=unhashed)


def _of_pairs(settings: Any, dataset: Any) -> Any:
    from ..training.data import sliders

    if dataset is None:
        raise ValueError(
            "Slider: slider method picture pairs needs a dataset. Connect Dataset: a folder of pairs, name.win.png and"
            " name.lose.png."
        )
    return sliders.of_pairs(settings, dataset)


NODES = [GraftSlider]
