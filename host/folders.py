"""Turns file names into paths in ComfyUI's folders, never outside the folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from ..storage.disk_errors import explain_disk_errors

OUTPUT_LORAS = "output/loras/"  # names of LoRAs saved in ComfyUI's output folder begin with this


def lora_names() -> list[str]:
    """All names that `lora_path` accepts: ComfyUI's loras folders first, then the demo's, then output/loras."""
    import folder_paths

    from . import demo_files

    saved = os.path.join(folder_paths.get_output_directory(), "loras")
    paths = [
        os.path.relpath(os.path.join(folder, file), saved) for folder, _, files in os.walk(saved) for file in files
    ]
    names = sorted(name.replace(os.sep, "/") for name in paths if name.endswith(".safetensors"))
    listed_names = list(folder_paths.get_filename_list("loras"))
    in_folders = set(map(_plain_name, listed_names))
    listed_names += [name for name in demo_files.LORAS if name not in in_folders and demo_files.lora_file(name)]
    return [*listed_names, *(OUTPUT_LORAS + name for name in names)]


def is_listed(name: str) -> bool:
    """Whether a name is in `lora_names`, with either kind of slash."""
    return _plain_name(name) in map(_plain_name, lora_names())


def _plain_name(name: str) -> str:
    return name.replace("\\", "/")


def lora_path(name: str) -> str:
    """The file of a LoRA, by its name.

    The name may be spelled as other systems do (`a\\b` is `a/b`, unless a file has that very name). Raises ValueError
    if it leaves its folder, FileNotFoundError with near matches if there is none.
    """
    import folder_paths

    from . import demo_files

    clean_name = _plain_name(name)
    if not _stays_inside(clean_name):
        raise ValueError(f"{name!r} is outside the loras folder; give a name inside it")
    path = folder_paths.get_full_path("loras", name) or folder_paths.get_full_path("loras", clean_name)
    if path is None and clean_name.startswith(OUTPUT_LORAS):
        path = os.path.join(folder_paths.get_output_directory(), *clean_name.split("/")[1:])
    path = path or demo_files.lora_file(clean_name)
    if path is None or not os.path.isfile(path):
        if is_listed(name):
            raise FileNotFoundError(
                f"LoRA file {name!r} is a link to a missing file; put the file back, or remove the link"
            )
        suggestions = near_loras(name)
        if suggestions:
            hint = f"; did you mean {' or '.join(suggestions)}?"
        else:
            hint = " in ComfyUI's loras folders"
        raise FileNotFoundError(f"no LoRA file {name!r}{hint}")
    return path


def near_loras(name: str, count: int = 3) -> list[str]:
    """Up to `count` LoRAs that the user may have meant, the likeliest first."""
    return near_files(name, _each_file_once(lora_names()), count)


def near_files(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Up to `count` of these files that the user may have meant, the likeliest first."""
    from ..patches.lora_files.near_names import near_names

    return near_names(name, names, count)


def _each_file_once(names: Iterable[str]) -> list[str]:
    """Names without those that reach a file of another one again, through a folder that links to one above it."""
    import folder_paths

    names = list(names)
    shortest: dict[str, str] = {}
    for name in sorted(names, key=len):
        path = folder_paths.get_full_path("loras", name)
        shortest.setdefault(os.path.realpath(path) if path else name, name)
    kept = set(shortest.values())
    return [name for name in names if name in kept]


def weights_path(name: str) -> str:
    """The path of a LoRA, checkpoint or diffusion model by name. ValueError when it leaves its folder,
    FileNotFoundError when there is none.
    """
    import folder_paths

    if _stays_inside(_plain_name(name)):
        for folder in ("checkpoints", "diffusion_models"):
            path = folder_paths.get_full_path(folder, name)
            if path is not None and os.path.isfile(path):
                return str(path)
    return lora_path(name)


def check_prefix(prefix: str) -> None:
    """Raises ValueError for a filename prefix that leaves its folder, or is empty."""
    if not _stays_inside(_plain_name(prefix)) or not prefix.strip("/\\ "):
        raise ValueError(f"filename prefix {prefix!r}: expected a name inside ComfyUI's output folder")


def output_file(prefix: str, extension: str) -> tuple[str, dict[str, str] | None]:
    """(path, ui entry) of the next free numbered file of a prefix, as ComfyUI itself counts them: under the folder that
    extra_model_paths.yaml names graft_files, of which the editor can show none, or under ComfyUI's output folder.
    """
    import folder_paths

    check_prefix(prefix)
    root = _named_folder("graft_files")
    with explain_disk_errors(root):
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, root)
    file = f"{name}_{counter:05}_{extension}"
    entry = {"filename": file, "subfolder": subfolder, "type": "output"}
    is_shown = "graft_files" not in folder_paths.folder_names_and_paths
    return os.path.join(folder, file), entry if is_shown else None


def input_folder(name: str) -> str:
    """The folder with this name in ComfyUI's input folder. ValueError when it is outside, FileNotFoundError when there
    is none.
    """
    root = input_root()
    path = os.path.realpath(os.path.join(root, name.strip() or "."))
    if not _stays_inside(_plain_name(name.strip())) or not is_below_input(path):
        raise ValueError(f"image folder {name!r} is outside ComfyUI's input folder; give a folder inside it")
    if path == root and not name.strip():
        raise ValueError("image folder is empty: give the name of a folder inside ComfyUI's input folder")
    if not os.path.isdir(path):
        raise FileNotFoundError(
            f"there is no folder {name!r} in ComfyUI's input folder ({root}); put it there, or choose another"
        )
    return path


def input_picture(folder: str, name: str, exists: Callable[[str], bool] = os.path.isfile) -> tuple[str, str]:
    """(path of the folder, path of a picture in it), both below ComfyUI's input folder. ValueError when the name leaves
    its folder, FileNotFoundError when there is no such file, or folder where `exists` says so.
    """
    root = input_folder(folder)
    path = os.path.join(root, *_plain_name(name).split("/"))
    if not _stays_inside(_plain_name(name)) or not is_below_input(path):
        raise ValueError(f"picture {name!r} is outside the folder {folder!r}; give a name inside it")
    if not exists(path):
        raise FileNotFoundError(f"there is no picture {name!r} in the folder {folder!r}")
    return root, path


def is_below_input(path: str) -> bool:
    """Whether a path is in ComfyUI's input folder, links followed."""
    root = input_root()
    return os.path.commonpath([root, os.path.realpath(path)]) == root


def input_file(name: str) -> str:
    """The file with this name in ComfyUI's input folder. ValueError when it is outside, FileNotFoundError when there is
    none.
    """
    root = input_root()
    path = os.path.realpath(os.path.join(root, name.strip()))
    if not _stays_inside(_plain_name(name.strip())) or not is_below_input(path):
        raise ValueError(f"{name!r} is outside ComfyUI's input folder; give a file inside it")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {name!r} in ComfyUI's input folder ({root})")
    return path


def is_dataset_config(name: str) -> bool:
    """Whether a name in ComfyUI's input folder is that of kohya's dataset_config.toml, and not of a folder."""
    name = name.strip()
    return name.lower().endswith(".toml") and not os.path.isdir(os.path.join(input_root(), name))


def input_root() -> str:
    """ComfyUI's input folder, links followed."""
    import folder_paths

    return os.path.realpath(folder_paths.get_input_directory())


def relative_to_input(path: str | os.PathLike[str]) -> str:
    """A path in ComfyUI's input folder relative to it, with forward slashes."""
    return os.path.relpath(path, input_root()).replace(os.sep, "/")


def pictures_folder(name: str) -> str:
    """`input_folder`; until the demo's folders are in ComfyUI's input folder, Graft's own copies of them."""
    from . import demo_files

    try:
        return input_folder(name)
    except FileNotFoundError:
        own = demo_files.pictures_folder(name)
        if own is None:
            raise
        return own


def training_folder() -> str:
    """Where runs are stored: the folder that extra_model_paths.yaml names graft_runs, or output/graft."""
    return _named_folder("graft_runs", "graft")


def previews_folder() -> str:
    """Where previews of runs are kept: in the output folder in any case, as ComfyUI shows pictures from there alone."""
    import folder_paths

    return os.path.join(folder_paths.get_output_directory(), "graft")


def _named_folder(kind: str, default: str = "") -> str:
    """The first folder that the owner of this ComfyUI named as `kind` in extra_model_paths.yaml. Where none is named,
    the folder `default` in the output folder.
    """
    import folder_paths

    if kind in folder_paths.folder_names_and_paths:
        return os.path.abspath(folder_paths.get_folder_paths(kind)[0])
    output = str(folder_paths.get_output_directory())
    return os.path.join(output, default) if default else output  # ComfyUI compares paths without a slash at the end


def loras_folder() -> str:
    """Where new LoRA files go: the first of ComfyUI's loras folders that is there. Where none is, the first is made.
    Raises FileNotFoundError when ComfyUI names none, OSError when it cannot be made.
    """
    import folder_paths

    known = folder_paths.get_folder_paths("loras")
    if not known:
        raise FileNotFoundError("ComfyUI has no loras folder: name one in extra_model_paths.yaml")
    folder = next((one for one in known if os.path.isdir(one)), known[0])
    os.makedirs(folder, exist_ok=True)
    return str(folder)


def store_limit() -> int:
    """The size limit in bytes for all training states: the environment variable GRAFT_STORE_GB, or 100 GB. 0 means no
    limit.
    """
    return _gigabytes("GRAFT_STORE_GB", "100", "no limit")


def upload_limit() -> int:
    """The most bytes of a LoRA file that is dropped onto a node: the environment variable GRAFT_UPLOAD_GB, or 4 GB.
    0 means that none is taken.
    """
    return _gigabytes("GRAFT_UPLOAD_GB", "4", "none at all")


def _gigabytes(variable: str, default: str, zero: str) -> int:
    text = os.environ.get(variable, default)
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise ValueError(f"the environment variable {variable} is {text!r}, expected a number of GB, or 0 for {zero}")
    return int(limit * 1e9)


def states_folder() -> str:
    """Where named training states are saved: the folder that extra_model_paths.yaml names graft_states, or
    output/graft_states.
    """
    return _named_folder("graft_states", "graft_states")


def _stays_inside(name: str) -> bool:
    """Whether a relative path with forward slashes stays inside its folder, on every system."""
    return not (name.startswith("/") or ".." in name.split("/") or ":" in name or "\0" in name)
