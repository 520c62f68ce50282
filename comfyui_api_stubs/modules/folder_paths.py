"""Where files are: input, output, temporary and model folders, and safe names below them (ComfyUI's folder_paths)."""

from __future__ import annotations

import mimetypes
import os
import time
from collections.abc import Collection

from comfy.cli_args import args

supported_pt_extensions: set[str] = {".ckpt", ".pt", ".pt2", ".bin", ".pth", ".safetensors", ".pkl", ".sft"}
folder_names_and_paths: dict[str, tuple[list[str], set[str]]] = {}

# A ComfyUI keeps everything beside its own source; the embedded host works where it is started, or where it is told to.
base_path = os.path.abspath(getattr(args, "base_directory", None) or os.environ.get("GRAFT_BASE") or os.getcwd())
models_dir = os.path.join(base_path, "models")
output_directory = os.path.join(base_path, "output")
temp_directory = os.path.join(base_path, "temp")
input_directory = os.path.join(base_path, "input")
user_directory = os.path.join(base_path, "user")

_MODEL_FOLDERS = {
    "checkpoints": ("checkpoints",),
    "loras": ("loras",),
    "vae": ("vae",),
    "text_encoders": ("text_encoders", "clip"),
    "diffusion_models": ("unet", "diffusion_models"),
    "clip_vision": ("clip_vision",),
    "embeddings": ("embeddings",),
    "vae_approx": ("vae_approx",),
    "controlnet": ("controlnet", "t2i_adapter"),
    "upscale_models": ("upscale_models",),
    "hypernetworks": ("hypernetworks",),
    "model_patches": ("model_patches",),
}
for _name, _folders in _MODEL_FOLDERS.items():
    folder_names_and_paths[_name] = ([os.path.join(models_dir, folder) for folder in _folders], supported_pt_extensions)
folder_names_and_paths["custom_nodes"] = ([os.path.join(base_path, "custom_nodes")], set())

_LEGACY = {"unet": "diffusion_models", "clip": "text_encoders"}
_SUFFIXES = {"[output]": "output", "[input]": "input", "[temp]": "temp"}
_MIMES = {".webp": "image", ".fbx": "model"}


def map_legacy(folder_name: str) -> str:
    """The present name of a model folder's kind."""
    return _LEGACY.get(folder_name, folder_name)


def set_output_directory(output_dir: str) -> None:
    global output_directory
    output_directory = output_dir


def set_temp_directory(temp_dir: str) -> None:
    global temp_directory
    temp_directory = temp_dir


def set_input_directory(input_dir: str) -> None:
    global input_directory
    input_directory = input_dir


def set_user_directory(user_dir: str) -> None:
    global user_directory
    user_directory = user_dir


def get_output_directory() -> str:
    return output_directory


def get_temp_directory() -> str:
    return temp_directory


def get_input_directory() -> str:
    return input_directory


def get_user_directory() -> str:
    return user_directory


def get_directory_by_type(type_name: str) -> str | None:
    """The folder that "output", "temp" or "input" names; None for any other name, because requests may not read
    elsewhere.
    """
    if type_name not in ("output", "temp", "input"):
        return None
    return globals()[f"{type_name}_directory"]


def is_within_directory(directory: str, target: str) -> bool:
    """Whether `target`, links followed, lies in `directory`."""
    try:
        directory, target = os.path.realpath(directory), os.path.realpath(target)
        return os.path.commonpath((directory, target)) == directory
    except ValueError:  # other drive, or a name with a null byte
        return False


def filter_files_content_types(files: list[str], content_types: list[str]) -> list[str]:
    """The files whose kind by extension ("image", "video", "audio", "model") is one of `content_types`."""

    def kind(file: str) -> str:
        guessed = mimetypes.guess_type(file, strict=False)[0]
        return _MIMES.get(os.path.splitext(file)[1].lower()) or (guessed or "").split("/")[0]

    return [file for file in files if kind(file) in content_types]


def filter_files_extensions(files: Collection[str], extensions: Collection[str]) -> list[str]:
    """The files with one of the extensions (all of them when there is none to ask for), sorted."""
    return sorted(file for file in files if not extensions or os.path.splitext(file)[-1].lower() in extensions)


def annotated_filepath(name: str) -> tuple[str, str | None]:
    """Split "file.png [output]" into the name, its space kept, and the folder meant; None when nothing is annotated."""
    for suffix, kind in _SUFFIXES.items():
        if name.endswith(suffix):
            return name[: -len(suffix) - 1], get_directory_by_type(kind)
    return name, None


def get_annotated_filepath(name: str, default_dir: str | None = None) -> str:
    """The path of a file in the folder its annotation names, else in `default_dir` or the input folder.

    Raises ValueError when the name leaves that folder."""
    file, directory = annotated_filepath(name)
    directory = directory or default_dir or get_input_directory()
    path = os.path.abspath(os.path.join(directory, file))
    if not is_within_directory(directory, path):
        raise ValueError(f"Invalid file path: {file!r}")
    return path


def exists_annotated_filepath(name: str) -> bool:
    """Whether the file that `get_annotated_filepath` means is there; a name that leaves the folder is not."""
    file, directory = annotated_filepath(name)
    directory = directory or get_input_directory()
    path = os.path.abspath(os.path.join(directory, file))
    return is_within_directory(directory, path) and os.path.exists(path)


def add_model_folder_path(folder_name: str, full_folder_path: str, is_default: bool = False) -> None:
    """Add a folder to a kind of models, at the front when it is the default."""
    paths, _ = folder_names_and_paths.setdefault(map_legacy(folder_name), ([], set()))
    if full_folder_path in paths:
        if not is_default:
            return
        paths.remove(full_folder_path)
    paths.insert(0 if is_default else len(paths), full_folder_path)


def get_folder_paths(folder_name: str) -> list[str]:
    """The folders of a kind of models."""
    return list(folder_names_and_paths[map_legacy(folder_name)][0])


def recursive_search(directory: str, excluded_dir_names: list[str] | None = None) -> tuple[list[str], dict[str, float]]:
    """All files below a folder, relative to it, and each folder's modification time."""
    if not os.path.isdir(directory):
        return [], {}
    files, times = [], {}
    for folder, subfolders, names in os.walk(directory, followlinks=True):
        subfolders[:] = [name for name in subfolders if name not in (excluded_dir_names or [])]
        times[folder] = os.path.getmtime(folder)
        files += [os.path.relpath(os.path.join(folder, name), directory) for name in names]
    return files, times


def get_full_path(folder_name: str, filename: str) -> str | None:
    """The file of that name in the first folder of a kind that has it, else None; the name cannot lead out of the
    folder.
    """
    folders, _ = folder_names_and_paths.get(map_legacy(folder_name), ([], set()))
    filename = os.path.relpath(os.path.join("/", filename), "/")
    for folder in folders:
        path = os.path.join(folder, filename)
        if os.path.isfile(path):
            return path
    return None


def get_full_path_or_raise(folder_name: str, filename: str) -> str:
    """As `get_full_path`; raises FileNotFoundError naming the folder and the file."""
    path = get_full_path(folder_name, filename)
    if path is None:
        raise FileNotFoundError(f"Model in folder '{folder_name}' with filename '{filename}' not found.")
    return path


def get_filename_list(folder_name: str) -> list[str]:
    """The names of the files of a kind of models, over all its folders, sorted."""
    folders, extensions = folder_names_and_paths[map_legacy(folder_name)]
    names: set[str] = set()
    for folder in folders:
        names.update(filter_files_extensions(recursive_search(folder, [".git"])[0], extensions))
    return sorted(names)


def _filled(prefix: str, width: int, height: int) -> str:
    """A file prefix with %width%, %height% and the time's fields replaced."""
    now = time.localtime()
    values = {
        "width": width,
        "height": height,
        "year": now.tm_year,
        "month": f"{now.tm_mon:02}",
        "day": f"{now.tm_mday:02}",
        "hour": f"{now.tm_hour:02}",
        "minute": f"{now.tm_min:02}",
        "second": f"{now.tm_sec:02}",
    }
    for name, value in values.items():
        prefix = prefix.replace(f"%{name}%", str(value))
    return prefix


def _counter(file: str, prefix: str) -> int:
    """The counter in "prefix_00012_.png", 0 when the file is not one of this prefix."""
    if os.path.normcase(file[: len(prefix) + 1]) != os.path.normcase(f"{prefix}_"):
        return 0
    digits = file[len(prefix) + 1 :].split(".")[0].split("_")[0]
    return int(digits) if digits.isdecimal() else 0


def get_save_image_path(
    filename_prefix: str,
    output_dir: str,
    image_width: int = 0,
    image_height: int = 0,
) -> tuple[str, str, int, str, str]:
    """(folder, file name without counter, next counter, folder below output_dir, filled prefix); makes the folder.

    Raises ValueError when the prefix leads out of `output_dir`."""
    prefix = _filled(filename_prefix, image_width, image_height)
    subfolder, filename = os.path.split(os.path.normpath(prefix))
    folder = os.path.join(output_dir, subfolder)
    if not is_within_directory(output_dir, folder):
        raise ValueError(
            f"Saving image outside the output folder is not allowed: {os.path.abspath(folder)} is not in {output_dir}"
        )
    os.makedirs(folder, exist_ok=True)
    return (
        folder,
        filename,
        max((_counter(file, filename) for file in os.listdir(folder)), default=0) + 1,
        subfolder,
        prefix,
    )
