"""Which latents a model takes, and what is said of others."""

from types import SimpleNamespace

import pytest
import torch
from graft_nodes.host import latents
from graft_nodes.host.latents import check_dataset
from graft_nodes.training.data.dataset import Conditioning, Dataset


class AnyModel:
    """A model with latents of so many dimensions beside their channels."""

    def __init__(self, dimensions, channels):
        self.latent_format = SimpleNamespace(latent_dimensions=dimensions, latent_channels=channels)
        self.diffusion_model = SimpleNamespace()


def dataset(*shape):
    return Dataset.from_latents([torch.zeros(shape)], [""], {"": Conditioning(torch.zeros(1, 2, 4))})


@pytest.mark.parametrize(("dimensions", "shape"), [(1, (4, 10)), (2, (4, 8, 8)), (3, (4, 8, 8)), (3, (4, 5, 8, 8))])
def test_latents_of_the_models_own_form_are_taken(dimensions, shape):
    check_dataset(AnyModel(dimensions, 4), dataset(*shape), "Start Training")


@pytest.mark.parametrize(
    ("dimensions", "shape", "takes", "has"),
    [
        (1, (4, 8, 8), "sound, over time alone", "a picture or a clip, with 4"),
        (2, (4, 10), "pictures", "sound, with 4"),
        (3, (4, 10), "pictures or clips", "sound, with 4"),
        (2, (16, 8, 8), "pictures", "a picture or a clip, with 16"),
    ],
)
def test_others_are_refused_with_what_the_model_takes(dimensions, shape, takes, has):
    said = (
        f"^Start Training: AnyModel takes latents of {takes}, with 4 channels, and .* has one of {has}: its shape is "
    )
    with pytest.raises(ValueError, match=said):
        check_dataset(AnyModel(dimensions, 4), dataset(*shape), "Start Training")


@pytest.mark.parametrize(
    ("shape", "own", "factor", "asked", "expected"),
    [
        ((2, 4, 16, 24), 8, 8, (128, 0), (2, 4, 16, 16)),
        ((1, 4, 64, 64), 8, 16, (0, 1024), (1, 4, 64, 32)),  # ComfyUI's empty latent of 512 x 512, for a VAE of 16
        ((1, 16, 5, 60, 104), None, 8, (640, 368), (1, 16, 5, 46, 80)),
        ((1, 4, 8, 8), None, 8, (0, 0), (1, 4, 8, 8)),
    ],
)
def test_an_empty_latent_of_another_size(shape, own, factor, asked, expected):
    latent = {"samples": torch.zeros(shape), **({} if own is None else {"downscale_ratio_spacial": own})}
    made = latents.at_size(latent, SimpleNamespace(spacial_compression_encode=lambda: factor), *asked)
    assert tuple(made["samples"].shape) == expected and latents.is_empty(made["samples"])
    assert latent["samples"].shape == shape and not latents.is_empty(torch.ones(1))
