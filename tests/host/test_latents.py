"""Which latents a model takes, and what is said of others."""

from types import SimpleNamespace

import pytest
import torch
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
