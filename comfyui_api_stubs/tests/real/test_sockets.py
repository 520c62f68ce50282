"""io and ui of the embedded host send what those of ComfyUI 0.33.0 send: names, arguments, options, members."""

from __future__ import annotations

from pathlib import Path

import comfy
import pytest

from comfyui_api_stubs import compare

CHECKOUT = Path(next(iter(comfy.__path__))).parent


def test_io_and_ui_are_the_same():
    version = compare.version_of(CHECKOUT)
    if version != "0.33.0":
        pytest.skip(f"the embedded host follows 0.33.0, and this is {version}")
    different, why = compare.compare_sockets(CHECKOUT)
    assert different == compare.Difference(compare.SOCKETS), why
