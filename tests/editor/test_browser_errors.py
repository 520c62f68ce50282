"""What goes wrong is said where people look, on the embedded host; tests/with_comfyui has it on a real ComfyUI."""

import error_stories
import pytest


@pytest.mark.parametrize("story", error_stories.ALL, ids=lambda story: story.__name__)
def test(editor, place, tmp_path, story):
    story(editor, place, tmp_path)
