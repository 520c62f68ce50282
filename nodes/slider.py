"""The node for sliders: prompts or pairs of pictures in, a dataset that trains a direction out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy_api.latest import io

from .. import host
from ..training.objective.slider import SliderSettings
from .schema import Dataset, GraftNode, inputs_of, search_aliases

if TYPE_CHECKING:
    from ..host.comfyui_objects import Clip, Vae
    from ..training.data.dataset import Dataset as TrainingData


class GraftSlider(GraftNode):
    """Makes a dataset that trains a slider."""

    settings_class = SliderSettings
    checked_together = (("method", "positive", "negative", "target", "neutral", "keep", "anchor"),)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftSlider",
            display_name="Slider",
            category="Graft/training",
            description=(
                "Trains a LoRA as a slider: a strength above 0 moves a property one way, below 0 the other way. It"
                " learns from prompts alone, without pictures, or from pairs of pictures. Connect it to dataset of"
                " Start Training."
            ),
            **search_aliases("concept slider", "slider lora", "direction", "leco", "image slider", "attribute"),
            inputs=[
                *inputs_of(cls.settings_class),
                io.Clip.Input("clip", optional=True, tooltip="Encodes the prompts. Picture pairs need none."),
                io.Vae.Input(
                    "vae", optional=True, tooltip="Without pictures: Graft reads the shape of the latents from it."
                ),
                Dataset.Input(
                    "dataset",
                    optional=True,
                    tooltip=(
                        "From Dataset. Optional for prompts: the slider is trained on its pictures instead of noise,"
                        " without their captions. For picture pairs: name.win.png for strength 1 with name.lose.png"
                        " for -1, or pictures with a control picture each as reference latents."
                    ),
                ),
            ],
            outputs=[Dataset.Output(display_name="GRAFT_DATASET"), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(
        cls, chosen: SliderSettings, clip: Clip = None, vae: Vae = None, dataset: TrainingData | None = None
    ) -> io.NodeOutput:
        from ..training.data import sliders

        if chosen.takes_prompts:
            made = _make_of_prompts(chosen, clip, vae, dataset)
        else:
            if dataset is None:
                raise ValueError(
                    "Slider: slider method picture pairs needs a dataset. Connect Dataset: a folder of pairs,"
                    " name.win.png and name.lose.png."
                )
            made = sliders.make_pair_dataset(chosen, dataset)
        report = "\n".join(sliders.describe(made))
        return io.NodeOutput(made, report, ui={"text": [report]})


def _make_of_prompts(settings: SliderSettings, clip: Clip, vae: Vae, dataset: TrainingData | None) -> TrainingData:
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
        return sliders.make_picture_dataset(settings, dataset, conditionings, clip_hash)
    vae_hash = host.fingerprint.fingerprint_of(vae, "vae")
    size = settings.width, settings.height
    latent = host.encoding.encode_pictures(vae, torch.zeros(1, settings.height, settings.width, 3))[0]
    hashes = vae_hash.digest, f"{clip_hash.digest} 0"
    unhashed = vae_hash.unhashed + clip_hash.unhashed
    return sliders.make_noise_dataset(settings, latent, size, conditionings, hashes, unhashed=unhashed)


NODES = [GraftSlider]
