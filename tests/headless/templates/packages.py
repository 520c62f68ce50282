"""What the comparison takes from the package registry, each in a virtual environment of its own under build/templates:
ComfyUI's workflow templates, front ends, and what ComfyUI needs to define all its nodes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

BUILD = Path(__file__).resolve().parents[3] / "build" / "templates"
TEMPLATES = ("comfyui-workflow-templates-json", "0.1.123")
FRONT_END = "comfyui-frontend-package"
GLSL = ("comfy-angle", "0.1.1"), ("PyOpenGL", "3.1.10")  # the GLSL node loads them when it is defined


def installed(package: str, version: str) -> Path:
    """The folder that holds the package, installed first if it is not there yet."""
    place = BUILD / "packages" / f"{package}-{version}"
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    done = place / "installed"
    if not done.exists():
        print(f"installing {package} {version}", flush=True)
        venv.create(place, with_pip=False, clear=True)
        pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps")
        subprocess.run([*pip, f"{package}=={version}"], check=True)
        done.touch()
    (found,) = place.rglob("site-packages")
    return found


def templates() -> list[Path]:
    """The workflow files of ComfyUI's own templates, by name."""
    folder = installed(*TEMPLATES) / "comfyui_workflow_templates_json" / "templates"
    files = sorted(folder.glob("*.json"))
    return [path for path in files if not path.name.startswith(("index.", "index_"))]


def front_end(version: str) -> Path:
    """The folder of a front end that a server serves."""
    return installed(FRONT_END, version) / "comfyui_frontend_package" / "static"


def glsl() -> list[str]:
    """The folders that ComfyUI finds its GLSL packages in."""
    return [str(installed(*package)) for package in GLSL]
