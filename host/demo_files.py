"""The demo's pictures and its LoRAs, which workflows may name before they are in ComfyUI's folders.

Until they are there, Graft's own copies are read. A node that needs them puts copies into ComfyUI's folders and says
so; what a user has there is never replaced.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..storage.atomic import copy_whole

SOURCE = Path(__file__).resolve().parents[1] / "demo"
PICTURES = {f"graft_demo/{name}": SOURCE / name for name in ("concept", "regular", "preference")}
LORA = "graft_demo/zorp.safetensors"
LORAS = {LORA: SOURCE / "zorp.safetensors", "graft_demo/mauve.safetensors": SOURCE / "mauve.safetensors"}


def pictures_folder(name: str) -> str | None:
    """Graft's own copy of the demo's folder with this name, if there is one."""
    source = PICTURES.get(_plain_name(name))
    if source is None or not source.is_dir():
        return None
    return str(source)


def lora_file(name: str) -> str | None:
    """Graft's own copy of the demo's LoRA with this name, if there is one."""
    source = LORAS.get(_plain_name(name))
    if source is None or not source.is_file():
        return None
    return str(source)


def place_pictures(name: str) -> str:
    """Put the demo's folder with this name into ComfyUI's input folder. Returns what to tell the user; nothing when it
    is there already, or is not the demo's.
    """
    import folder_paths

    if pictures_folder(name) is None:
        return ""
    plain = _plain_name(name)
    target = os.path.join(folder_paths.get_input_directory(), *plain.split("/"))
    return _place(PICTURES[plain], target, f"the demo's images into ComfyUI's input folder, as {plain}")


def place_loras() -> list[str]:
    """Put the demo's LoRAs into ComfyUI's loras folder. Returns what to tell the user of each; nothing of those that
    are there already.
    """
    return [said for name in LORAS if (said := _place_lora(name))]


def _place_lora(name: str) -> str:
    import folder_paths

    if lora_file(name) is None or folder_paths.get_full_path("loras", name) is not None:
        return ""
    target = os.path.join(folder_paths.get_folder_paths("loras")[0], *name.split("/"))
    return _place(LORAS[name], target, f"the demo's LoRA into ComfyUI's loras folder, as {name}")


def _place(source: Path, target: str, what: str) -> str:
    """Copy a file or a folder whole or not at all, and say so."""
    if os.path.lexists(target):
        return ""
    try:
        copy_whole(source, target)
    except OSError as error:
        return f"could not put {what} ({error.strerror or error}); Graft reads its own copy"
    return f"put {what}"


def _plain_name(name: str) -> str:
    return name.strip().replace("\\", "/").rstrip("/")
