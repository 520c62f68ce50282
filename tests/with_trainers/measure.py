"""Measures the files of one trainer in a process of its own: python -m … COMFYUI TRAINER [CHECKOUT] RESULT."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "with_comfyui"))


def commit(checkout: str) -> str:
    """The commit of a checkout, in short."""
    words = ("git", "-C", checkout, "rev-parse", "--short=10", "HEAD")
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def main(arguments: list[str]) -> None:
    import diffusers  # noqa: F401  (before stand-ins are there, so that it does not take them for packages)
    import open_comfyui

    comfyui, name, checkout, result, *only = arguments
    open_comfyui.open_checkout(comfyui)
    import comfyui_version

    missing: list[str] = []
    if checkout:
        from .trainers import stand_ins

        missing = stand_ins.open_checkout(name, checkout)
    trainer = importlib.import_module(f".trainers.{name}", __package__)
    from . import compare

    rows, broken = [], []
    for case in trainer.CASES:
        if only and not any(word in f"{case.layout} {case.kind}" for word in only):
            continue
        with tempfile.TemporaryDirectory(prefix="graft-trainer-files-") as folder:
            try:
                found = compare.measured(case, Path(folder))
            except Exception as error:  # noqa: BLE001  (the next case may work; the end says that this one did not)
                broken.append(f"{case.trainer}, {case.layout}, {case.kind}: {error!r}")
                traceback.print_exc()
                continue
        print(found, flush=True)
        rows.append(found.as_dict())
    written = {"comfyui": comfyui_version.__version__, "trainer": name, "rows": rows, "broken": broken}
    written["version"] = getattr(trainer, "VERSION", "") or commit(checkout)
    written["stood_in_for"] = missing
    Path(result).write_text(json.dumps(written, indent=1), encoding="utf-8")
    if broken:
        sys.exit("\n".join(broken))


if __name__ == "__main__":
    main(sys.argv[1:])
