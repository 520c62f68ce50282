"""What goes wrong is said where people look, on a real ComfyUI's own server, in a real browser."""

from __future__ import annotations

import error_stories
import pytest


@pytest.mark.browser
@pytest.mark.parametrize("story", error_stories.ALL, ids=lambda story: story.__name__)
def test(editor, server, tmp_path, story):
    story(editor, server.place, tmp_path)
