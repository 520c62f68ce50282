"""`doctor`: reports the host and the device, and what works on them."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import sys
from typing import Any

from ..storage.printable import pip_install
from . import hosts, log
from .embedded import HostError

GIB = 2**30
EDITOR_NEEDS = (("aiohttp", "aiohttp"), ("comfyui_frontend_package", "comfyui-frontend-package"))  # (module, package)


def device(host: hosts.Host) -> str:
    """The device that models run on, as text, such as "cuda:0 (NVIDIA …)"."""
    import torch

    torch_device = host.management.get_torch_device()
    if torch_device.type == "cuda":
        return f"{torch_device} ({torch.cuda.get_device_name(torch_device)})"
    if torch_device.type == "cpu":
        return f"{torch_device} ({platform.machine()}, {torch.get_num_threads()} threads)"
    return str(torch_device)


def main(arguments: argparse.Namespace) -> int:
    """Print the report (or JSON); returns 0 if workflows can run here, 1 if the host cannot be opened."""
    stream = sys.stderr if arguments.json else sys.stdout
    versions = {"graft": hosts.graft_version(), "python": platform.python_version()}
    for name in ("torch", "numpy", "safetensors", "Pillow"):
        versions[name] = hosts.installed_version(name) or "not installed"
    report: dict[str, Any] = {"ok": False, "versions": versions, "errors": []}
    with contextlib.redirect_stdout(stream):
        try:
            choice = hosts.choose(arguments.comfyui, arguments.embedded, os.environ)
            report["host"] = str(choice)
            if choice.root is not None:
                report["missing packages"] = hosts.missing_requirements(choice.root)
            host = hosts.open_host(choice, arguments.cpu, arguments.input, arguments.output, make_folders=False)
        except HostError as error:
            report["errors"] = [str(error)]
        else:
            report.update(ok=True, **_look(host))
    if arguments.json:
        log.write(json.dumps(report, default=str) + "\n")
    else:
        _print(report)
    if report["ok"]:
        return 0
    return 1


def _look(host: hosts.Host) -> dict[str, Any]:
    torch_device = host.management.get_torch_device()
    dtypes = _dtypes(torch_device)
    works, fails = _features(host, torch_device, dtypes)
    return {
        "device": device(host),
        "dtypes": dtypes,
        "attention": _attention(torch_device),
        "works": works,
        "does not work": fails,
        "nodes": len(host.nodes.NODE_CLASS_MAPPINGS),
        "folders": {
            "input": host.folders.get_input_directory(),
            "output": host.folders.get_output_directory(),
            "temp": host.folders.get_temp_directory(),
        },
        "memory": _memory(host, torch_device),
        "free disk": _free_disk(host.folders.get_output_directory()),
    }


def _free_disk(folder: str) -> str:
    """The space where the output folder is, or where a run would make it."""
    return f"{shutil.disk_usage(hosts.existing(folder)).free / GIB:.1f} GiB in the output folder"


def _dtypes(place: Any) -> dict[str, str]:
    """Try a small matrix product in each dtype on the device: "computes", or why it fails."""
    import torch

    results = {}
    for name in ("float32", "bfloat16", "float16", "float8_e4m3fn"):
        try:
            matrix = torch.ones(16, 16, device=place).to(getattr(torch, name))
            torch.mm(matrix, matrix)
            results[name] = "computes"
        except (RuntimeError, NotImplementedError, TypeError) as error:
            reason = str(error).splitlines()[0][:100]
            results[name] = f"storage only ({reason})" if name.startswith("float8") else f"cannot compute ({reason})"
    return results


def _attention(place: Any) -> list[str]:
    """The attention kernels that are available here."""
    import torch

    kernels = ["pytorch scaled_dot_product_attention"]
    if place.type == "cuda":
        switches = {
            "flash": torch.backends.cuda.flash_sdp_enabled,
            "memory-efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
            "math": torch.backends.cuda.math_sdp_enabled,
        }
        kernels += [f"pytorch {name}" for name, enabled in switches.items() if enabled()]
    return kernels + [
        name for name in ("xformers", "flash_attn", "sageattention") if importlib.util.find_spec(name) is not None
    ]


def _features(host: hosts.Host, place: Any, dtypes: dict[str, str]) -> tuple[list[str], list[str]]:
    """(features of Graft that work on this host and device, features that do not, each with the reason)."""
    works = [
        "sampling and training in"
        f" {', '.join(name for name in dtypes if dtypes[name] == 'computes' and 'float8' not in name)}"
    ]
    from ..host.missing_packages import missing_packages

    works.append("training: every adapter, objective and schedule; optimizers, previews, averages, saved states")
    fails = missing_packages()
    if host.choice.root is None:
        works.append("nodes of other packs that need no more of ComfyUI than this host has (run --pack DIR)")
        fails.append("full checkpoints, ControlNet: they need a ComfyUI (--comfyui DIR)")
    else:
        works.append("the ComfyUI's own nodes and, where a workflow uses them, its custom nodes")
        fails.append("ComfyUI's dynamic VRAM: off when a workflow runs without ComfyUI's server")
        fails += [
            f"{name}: its import failed, so its nodes are missing (--verbose shows why)" for name in host.not_imported
        ]
    (works if place.type == "cuda" else fails).append(
        "pinned host memory" + ("" if place.type == "cuda" else f": not on {place.type}")
    )
    missing = [package for module, package in EDITOR_NEEDS if importlib.util.find_spec(module) is None]
    (fails if missing else works).append(
        "the graph editor on the embedded host (python -m graft_nodes editor)"
        + (f": {' and '.join(missing)} not installed ({pip_install(*missing)})" if missing else "")
    )
    return works, fails


def _memory(host: hosts.Host, place: Any) -> str:
    free, total = host.management.get_free_memory(place), host.management.get_total_memory(place)
    return f"{free / GIB:.1f} GiB free of {total / GIB:.1f} GiB on {place}"


def _print(report: dict[str, Any]) -> None:
    for name, value in report.items():
        if name in ("ok", "errors") or value in ([], {}):
            continue
        if isinstance(value, dict):
            log.say(f"{name}:")
            for key, entry in value.items():
                log.say(f"  {key}: {entry}")
        elif isinstance(value, list):
            log.say(f"{name}:")
            for entry in value:
                log.say(f"  - {entry}")
        else:
            log.say(f"{name}: {value}")
    for error in report["errors"]:
        log.say(f"graft_nodes: {error}", sys.stderr)
    log.say("ready" if report["ok"] else "not ready: workflows cannot run here")
