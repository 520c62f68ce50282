"""Graft's templates in the front end's dialog, on a real ComfyUI's own server, in a real browser."""

from __future__ import annotations

import pytest
import templates_dialog


@pytest.mark.browser
def test_templates_are_found_in_the_dialog_by_title_and_picture(editor):
    editor.clear()
    templates_dialog.are_found(editor)
