"""Measures the files that trainers write: `python dev.py trainer-files [TRAINER[=CHECKOUT] …] [--only WORD …]`.

Each trainer's own module code makes a network on a tiny model, its own saver writes the file, and what its layers then
compute is compared with what Graft makes of the file in the modes merge, bypass and host, and ComfyUI's own loader.
Checkouts that are not named are fetched into a temporary folder, which is deleted at the end. It needs a real ComfyUI:
COMFYUI_PATH or ~/ComfyUI. Without TRAINER every one is measured and docs/trainer_files.md is written.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from . import write_trainer_files

HERE = Path(__file__).parent
PACKAGES = HERE / "trainer_files.txt"  # what the trainers' math and savers import and Graft does not need, locked
TRAINERS = {  # name: its repository, "" for an installed package
    "sd_scripts": "https://github.com/kohya-ss/sd-scripts",
    "onetrainer": "https://github.com/Nerogar/OneTrainer",
    "ai_toolkit": "https://github.com/ostris/ai-toolkit",
    "musubi": "https://github.com/kohya-ss/musubi-tuner",
    "diffusers_library": "",
    "peft_library": "",
    "lycoris_library": "",
}


def comfyui() -> str:
    """The ComfyUI that COMFYUI_PATH or ~/ComfyUI names."""
    path = Path(os.environ.get("COMFYUI_PATH", "~/ComfyUI")).expanduser()
    if not (path / "comfy" / "model_patcher.py").is_file():
        sys.exit(f"{path} is not a ComfyUI checkout: set COMFYUI_PATH")
    return str(path)


def fetched(name: str, checkout: str, folder: Path) -> str:
    """The folder of a trainer's checkout: the one named, or one that is fetched; "" for an installed package."""
    if checkout or not TRAINERS[name]:
        return checkout
    target = folder / name
    if subprocess.call(("git", "clone", "--quiet", "--depth", "1", TRAINERS[name], str(target))):
        sys.exit(f"{TRAINERS[name]} could not be fetched; name the folder of a checkout: {name}=CHECKOUT")
    return str(target)


def packages(folder: Path) -> str:
    """Install what the trainers need into a folder; returns the folder."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
    subprocess.check_call([*pip, "--require-hashes", "--target", str(folder / "packages"), "-r", str(PACKAGES)])
    return str(folder / "packages")


def main(arguments: list[str]) -> int:
    """Measure the named trainers, or all of them, and write the page if it is all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainers", nargs="*", metavar="TRAINER[=CHECKOUT]", help=", ".join(TRAINERS))
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="of a layout or kind, such as flux")
    options = parser.parse_args(arguments)
    named = dict(word.partition("=")[::2] for word in options.trainers)
    unknown = sorted(named.keys() - TRAINERS.keys())
    if unknown:
        parser.error(f"unknown trainers {', '.join(unknown)}; there are {', '.join(TRAINERS)}")
    failed, results = 0, []
    with tempfile.TemporaryDirectory(prefix="graft-trainer-files-") as folder:
        paths = os.pathsep.join((packages(Path(folder)), os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep)
        for name in named or TRAINERS:
            checkout = fetched(name, named.get(name, ""), Path(folder))
            result = Path(folder, f"{name}.json")
            words = ("-m", f"{__package__}.measure", comfyui(), name, checkout, str(result), *options.only)
            failed += subprocess.call((sys.executable, *words), env={**os.environ, "PYTHONPATH": paths}) != 0
            if result.is_file():
                results.append(json.loads(result.read_text(encoding="utf-8")))
    wrong = write_trainer_files.wrong(results)
    print("\n".join(wrong) or "every file is the trainer's own forward")
    if not options.only and {result["trainer"] for result in results} == TRAINERS.keys():
        write_trainer_files.DOCUMENT.write_text(write_trainer_files.document(results), encoding="utf-8")
    return int(bool(failed or wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
