"""Models of full size from the headers of their files, whose weights are a hole on the disk."""

import json
import math

import comfy.model_management
import comfy.sd
import comfy.supported_models
import full_sizes
import planned_sizes
import pytest
from graft_nodes.host import fingerprint, memory_planning, model_headers
from tiny_families import EVERY

TITLES = ("SD 1.5", "SDXL", "Flux.1 dev", "Qwen-Image", "Wan 14B", "Z-Image")


def _file(path, title):
    """A file with the header of a model's weights in bf16; returns the weights, on the meta device."""
    weights = full_sizes.model(title, full_sizes.BF16).diffusion_model.state_dict()
    header, end = {}, 0
    for name, weight in weights.items():
        size = 2 * math.prod(weight.shape)
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return weights


def _layouts(weights):
    return {name: (weight.shape, weight.dtype) for name, weight in weights.items()}


@pytest.fixture
def opened(tmp_path):
    """`opened(title)`: the MODEL of a file with a header alone, and the weights that it stands for."""

    def opened(title):
        name = EVERY[full_sizes.FULL[title][0]].supported
        if not hasattr(comfy.supported_models, name):
            pytest.skip(f"this ComfyUI has no {name}")
        path = tmp_path / "model.safetensors"
        weights = _file(path, title)
        with model_headers.load_headers_only(), model_headers.load_as_on_card():
            return comfy.sd.load_diffusion_model(str(path)), weights

    return opened


@pytest.mark.parametrize("title", TITLES)
def test_a_model_has_its_shapes_and_no_weights(opened, title):
    patcher, weights = opened(title)
    found = patcher.model.diffusion_model.state_dict()
    assert {name: (w.shape, w.dtype) for name, w in found.items()} == {
        n: (w.shape, w.dtype) for n, w in weights.items()
    }
    assert all(weight.is_meta for weight in found.values())
    levels = patcher.get_model_object("model_sampling")
    assert float(levels.sigma_max) > float(levels.sigma_min) > 0
    assert fingerprint.fingerprint_patcher(patcher).unhashed == ("weights, as only the header of their file was read",)


def test_it_is_planned_as_it_would_be_with_weights(opened):
    patcher, _ = opened("SD 1.5")
    for checkpointing in (False, True):
        state, dataset = planned_sizes.run(patcher, "SD 1.5", 512, checkpointing)
        parts = memory_planning.plan(patcher, state, dataset).parts
        how = (planned_sizes.PLAIN, planned_sizes.CHECKPOINTED)[checkpointing]
        assert parts == planned_sizes.stored()["SD 1.5"]["512"][how]


def test_afterwards_weights_are_read_again(opened):
    before = comfy.sd.load_diffusion_model, comfy.model_management.unet_dtype
    opened("SD 1.5")
    assert before == (comfy.sd.load_diffusion_model, comfy.model_management.unet_dtype)
