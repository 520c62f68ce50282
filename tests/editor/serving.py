"""Starts `python -m graft_nodes editor`, or a ComfyUI with Graft, in a process of its own, for the tests of the
editor.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from graft_nodes.comfyui_api_stubs.tests.editor import serving
from graft_nodes.comfyui_api_stubs.tests.editor.serving import (
    PATIENCE,
    Client,
    Reply,
    at_once,
    front_end,
    picture,
    shows,
)

__all__ = ["PATIENCE", "Client", "Reply", "at_once", "front_end", "picture", "shows"]

ROOT = Path(__file__).resolve().parents[2]
UPLOAD_GB = "0.002"  # the servers of the browser tests take no larger LoRA


class Server(serving.Server):
    """A running server with Graft."""

    STARTS = ("graft_nodes", "editor", "--cpu")


class RealServer(Client):
    """The server of a ComfyUI checkout with Graft as a custom node, on the CPU, working in `place`."""

    def __init__(
        self, place: Path, checkout: str, front_end: str = "", environment: dict[str, str] | None = None
    ) -> None:
        self.place = place
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.host, self.port = "127.0.0.1", port
        script = Path(__file__).resolve().parents[1] / "with_comfyui" / "serve_comfyui.py"
        command = [
            sys.executable,
            str(script),
            str(Path(checkout).expanduser().resolve()),
            str(place),
            str(port),
            front_end,
        ]
        self.log = (place / "comfyui.log").open("w+", encoding="utf-8")
        env = {**os.environ, **(environment or {})}
        self.process = subprocess.Popen(command, env=env, stdout=self.log, stderr=subprocess.STDOUT)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.3)
        raise AssertionError(f"ComfyUI did not start:\n{(place / 'comfyui.log').read_text()[-3000:]}")

    def stop(self) -> None:
        """End it."""
        # not SIGINT, which a process that was started in the background ignores as long as it does not care
        self.process.terminate()
        self.process.wait(PATIENCE)
        self.log.close()


def named_front_end() -> list[str]:
    """The options of a Server that serves the front end in the folder that GRAFT_TEST_FRONT_END names, if it does."""
    named = os.environ.get("GRAFT_TEST_FRONT_END")
    return ["--front-end-root", named] if named else []


def lora(path: Path, more: dict[str, str] | None = None) -> None:
    """A LoRA file of rank 4 that says a few things about itself, some of them markup, and `more`."""
    import torch
    from safetensors.torch import save_file

    layer = "lora_unet_input_blocks_1_1_transformer_blocks_0_attn1_to_q"
    factors = {f"{layer}.lora_down.weight": torch.zeros(4, 8), f"{layer}.lora_up.weight": torch.zeros(8, 4)}
    said = {"ss_network_dim": "4", "ss_todo_factor": "2", "modelspec.trigger_phrase": "zorp, <b>bold</b>"}
    save_file(
        {**factors, f"{layer}.alpha": torch.tensor(2.0)},
        path,
        {**said, "ss_base_model_version": "SD 1.5", **(more or {})},
    )


def samples(steps: int, seed: int = 0) -> dict[str, Any]:
    """A workflow that samples the demo model for so many steps and saves the picture."""
    return {
        "1": {"class_type": "GraftDemo", "inputs": {}},
        "2": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": "red circle"}},
        "3": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "4": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["1", 0],
                "positive": ["2", 0],
                "negative": ["2", 0],
                "latent_image": ["3", 0],
                "seed": seed,
                "steps": steps,
                "cfg": 1.0,
                "sampler_name": "euler",
                "scheduler": "simple",
                "denoise": 1.0,
            },
        },
        "5": {"class_type": "VAEDecode", "inputs": {"samples": ["4", 0], "vae": ["1", 2]}},
        "6": {"class_type": "SaveImage", "inputs": {"images": ["5", 0], "filename_prefix": "sampled"}},
    }


def fill_place(place: Path) -> dict[str, str]:
    """Put into a server's folder what the browser tests count on: the demo's pictures and a LoRA. The environment that
    such a server needs: error_stories.py tells of a LoRA that is larger than it takes.
    """
    (place / "models" / "loras").mkdir(parents=True)
    (place / "input").mkdir()
    for folder in ("concept", "regular"):
        shutil.copytree(ROOT / "demo" / folder, place / "input" / folder)
    lora(place / "models" / "loras" / "zorp.safetensors")
    return {"GRAFT_UPLOAD_GB": UPLOAD_GB}


def few_pictures(folder: Path) -> None:
    """Put eight of the demo's pictures with their captions into the folder `few` of an input folder."""
    (folder / "few").mkdir()
    for path in sorted((Path(__file__).resolve().parents[2] / "demo" / "concept").iterdir())[:16]:
        shutil.copy(path, folder / "few")


def trains(run: str, steps: int, seed: int = 0, **inputs: Any) -> dict[str, Any]:
    """A workflow that trains a small LoRA on the pictures of `few_pictures`."""
    return {
        "1": {"class_type": "GraftDemo", "inputs": {}},
        "2": {
            "class_type": "GraftDataset",
            "inputs": {
                "folder": "few",
                "vae": ["1", 2],
                "clip": ["1", 1],
                "resolution": 64,
                "buckets": False,
                "bucket_step": 64,
                "captions": "txt",
                "repeats": 1,
                "flip": 0.0,
                "shuffle_tags": False,
                "keep_tags": 0,
                "tag_dropout": 0.0,
                "caption_dropout": 0.0,
                "clip_skip": 0,
                "validation": 0.25,
                "filters": "",
                "regularization_share": 0.25,
            },
        },
        "3": {
            "class_type": "GraftTrainStart",
            "inputs": {
                "model": ["1", 0],
                "clip": ["1", 1],
                "dataset": ["2", 0],
                "seed": seed,
                "run": run,
            },
        },
        "4": {
            "class_type": "TrainStep",
            "inputs": {
                "state": ["3", 0],
                "steps": steps,
                "epochs": 0.0,
                "validate_every": 2,
                "preview_every": 0,
                "snapshot_every": 0,
                **inputs,
            },
        },
    }
