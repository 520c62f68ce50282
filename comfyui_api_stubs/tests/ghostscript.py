"""A Ghostscript that only notes that it was started, and an EPS for which Pillow would start it."""

from pathlib import Path

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 6\n%%EndComments\nshowpage\n%%EOF\n"


def watch_ghostscript(folder: Path, monkeypatch) -> Path:
    """Puts the stand-in in front of PATH; returns a file that exists once it was started."""
    from PIL import EpsImagePlugin

    programs, started = folder / "programs", folder / "started"
    programs.mkdir()
    (programs / "gs").write_text(f'#!/bin/sh\ntouch {started}\n[ "$1" = --version ]\n')
    (programs / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    return started
