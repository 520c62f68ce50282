"""The first LoRA as a person makes it, on a real ComfyUI's own server, in a real browser."""

from __future__ import annotations

import first_lora
import pytest


@pytest.mark.browser
def test_from_an_empty_editor_to_an_image_with_the_own_lora(editor, server, tmp_path):
    first_lora.make(editor, server.place, tmp_path)


@pytest.mark.browser
def test_from_an_empty_editor_and_a_folder_of_twelve_pictures_in_six_clicks(editor, tmp_path):
    first_lora.make_with_few_clicks(editor, tmp_path)
