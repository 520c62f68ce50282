"""The first LoRA as a person makes it, on the embedded host; tests/with_comfyui has the same on a real ComfyUI."""

import first_lora


def test_from_an_empty_editor_to_an_image_with_the_own_lora(editor, place, tmp_path):
    first_lora.make(editor, place, tmp_path)


def test_from_an_empty_editor_and_a_folder_of_twelve_pictures_in_six_clicks(editor, tmp_path):
    first_lora.make_with_few_clicks(editor, tmp_path)
