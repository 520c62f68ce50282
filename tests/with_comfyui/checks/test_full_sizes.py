"""The sizes behind docs/memory.md are those of ComfyUI's classes."""

import comfy.supported_models
import full_sizes
import pytest
from tiny_families import EVERY


@pytest.mark.parametrize("title", full_sizes.FULL)
def test_the_file_has_what_is_counted_of_the_class(title):
    name = EVERY[full_sizes.FULL[title][0]].supported
    if not hasattr(comfy.supported_models, name):
        pytest.skip(f"this ComfyUI has no {name}")
    assert full_sizes.counted(title) == full_sizes.stored()[title]
