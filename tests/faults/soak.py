"""Hours of queueing, editing, stopping and resuming on the embedded host's server: memory, files, threads, disk and the
base stay.

python dev.py soak [--minutes 120]      prints a line a minute and a table; the exit status is 1 when something has
grown or changed
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import queue
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..editor.serving import Reply, Server, front_end, picture

ROOT = Path(__file__).resolve().parents[2]
WARM = 0.25  # of the time, which caches and allocators have to fill
RUNS = ("one", "two")


@dataclass(frozen=True)
class Measured:
    """The server between two rounds: seconds since the start, bytes of memory and of its folder, open files, threads,
    hash of the base.
    """

    seconds: float
    memory: int
    disk: int
    files: int
    threads: int
    base: str


GROWTH: dict[str, Callable[[float], float]] = {  # by how much the last third may be above the first after warming up
    "memory": lambda before: 0.05 * before + 20e6,
    "disk": lambda before: 0.02 * before + 5e6,
    "files": lambda _: 2,
    "threads": lambda _: 2,
}


class Editor(Server):
    """The server in a process of its own, with a node that hashes a model's base."""

    def __init__(self, place: Path) -> None:
        self.place, self.known = place, dict[str, dict[str, Any]]()
        (place / "input").mkdir()
        (place / "models" / "loras").mkdir(parents=True)
        shutil.copytree(ROOT / "demo" / "concept", place / "input" / "concept")
        options = ("--port", "0", "--no-browser", "--cpu", "--front-end-root", str(front_end(place / "front")))
        command = [sys.executable, "-m", "graft_nodes.tests.faults.soak", "serve", "editor", *options]
        alone = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
        }  # so small a model only waits for further threads where others compute too
        self.process = subprocess.Popen(
            command, cwd=place, env=alone, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._said: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        address = self.wait_for("editor: http").split()[1]
        self.host, _, given = address.removeprefix("http://").rstrip("/").rpartition(":")
        self.port = int(given)

    def queue(self, prompt: dict[str, Any], **more: Any) -> Reply:
        """POST /prompt, every widget that a node does not name at its default."""
        whole = {
            key: {**node, "inputs": {**self._defaults(node["class_type"]), **node["inputs"]}}
            for key, node in prompt.items()
        }
        return super().queue(whole, **more)

    def _defaults(self, kind: str) -> dict[str, Any]:
        if kind not in self.known:
            inputs = self.ask(f"/object_info/{kind}").json.get(kind, {}).get("input", {})
            entries = {name: entry for part in ("required", "optional") for name, entry in inputs.get(part, {}).items()}
            told = {name: (entry[0], entry[1] if len(entry) > 1 else {}) for name, entry in entries.items()}
            lists = {name: one if isinstance(one, list) else more.get("options") for name, (one, more) in told.items()}
            self.known[kind] = {name: more["default"] for name, (_, more) in told.items() if "default" in more}
            self.known[kind] |= {name: of[0] for name, of in lists.items() if of and name not in self.known[kind]}
        return self.known[kind]

    def draw_pictures(self) -> None:
        """Several at once, so that every thread that draws pictures has started before threads are counted."""
        assert self.upload("seen.png", picture(), overwrite="true").status == 200
        view = "/view?filename=seen.png&type=input&preview=webp;50"
        with ThreadPoolExecutor(8) as pool:
            assert {reply.status for reply in pool.map(self.ask, [view] * 32)} == {200}

    def measured(self, begun: float) -> Measured:
        """What the process holds now, when nothing runs."""
        place = Path("/proc") / str(self.process.pid)
        status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
        disk = sum(path.stat().st_size for path in self.place.rglob("*") if path.is_file())
        base = self.done({"1": demo(), "2": {"class_type": "HashOfBase", "inputs": {"model": ["1", 0]}}})["outputs"][
            "2"
        ]["text"][0]
        memory, files = int(status["VmRSS"].split()[0]) * 1024, len(os.listdir(place / "fd"))
        return Measured(time.monotonic() - begun, memory, disk, files, int(status["Threads"]), base)

    def done(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """The history entry of a workflow once it has run."""
        reply = self.queue(prompt)
        assert reply.status == 200, reply.body
        return self.wait(reply.json["prompt_id"])


def demo() -> dict[str, Any]:
    return {"class_type": "GraftDemo", "inputs": {}}


def trains(run: str, steps: int, seed: int, rate: float) -> dict[str, Any]:
    """A workflow that trains a LoRA, samples with it, and saves both."""
    return {
        "1": demo(),
        "2": {
            "class_type": "GraftDataset",
            "inputs": {"folder": "concept", "vae": ["1", 2], "clip": ["1", 1], "resolution": 128},
        },
        "3": {"class_type": "GraftAdapter", "inputs": {"kind": "lora", "rank": 4}},
        "4": {
            "class_type": "GraftOptimizer",
            "inputs": {"settings": ["3", 0], "learning_rate": rate, "batch_size": 2, "total_steps": 40},
        },
        "5": {"class_type": "GraftEMA", "inputs": {"settings": ["4", 0], "schedule": "ramp"}},
        "6": {
            "class_type": "GraftTrainStart",
            "inputs": {
                "model": ["1", 0],
                "dataset": ["2", 0],
                "clip": ["1", 1],
                "vae": ["1", 2],
                "settings": ["5", 0],
                "seed": seed,
                "run": run,
            },
        },
        "7": {
            "class_type": "TrainStep",
            "inputs": {"state": ["6", 0], "steps": steps, "validate_every": 10, "snapshot_every": 5},
        },
        "8": {"class_type": "GraftSaveLoRA", "inputs": {"lora_model": ["7", 3], "prefix": "loras/soak"}},
        **samples(["7", 1], "9"),
    }


def samples(model: list[Any], at: str, steps: int = 2) -> dict[str, Any]:
    """Nodes that sample a small picture with a model."""
    inputs = {
        "model": model,
        "positive": [f"{at}0", 0],
        "negative": [f"{at}0", 0],
        "latent_image": [f"{at}1", 0],
        "seed": 1,
    }
    inputs |= {"steps": steps, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    return {
        f"{at}0": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": "a zorp left"}},
        f"{at}1": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        f"{at}2": {"class_type": "KSampler", "inputs": inputs},
        f"{at}3": {"class_type": "VAEDecode", "inputs": {"samples": [f"{at}2", 0], "vae": ["1", 2]}},
        f"{at}4": {"class_type": "SaveImage", "inputs": {"images": [f"{at}3", 0], "filename_prefix": "soak"}},
    }


def stacks(file: str, strength: float, mode: str) -> dict[str, Any]:
    """A workflow that samples with a stack of one LoRA."""
    rows = [{"file": file, "on": True, "model": strength, "clip": 1.0}]
    return {
        "1": demo(),
        "2": {"class_type": "GraftLoRAStack", "inputs": {"rows": json.dumps({"version": 1, "rows": rows})}},
        "3": {
            "class_type": "LoRAStackPatch",
            "inputs": {"model": ["1", 0], "lora_stack": ["2", 0], "lora_strength": 1.0, "mode": mode},
        },
        **samples(["3", 0], "9"),
    }


class User:
    """Somebody who works with the editor, the same way for the same seed."""

    def __init__(self, editor: Editor, seed: int) -> None:
        self.editor, self.draw = editor, random.Random(seed)
        self.did: dict[str, int] = {}
        self.acts = (
            self.train,
            self.stop,
            self.interrupt,
            self.stack,
            self.wrong,
            self.pages,
            self.files,
            self.free,
        )

    def untried(self) -> list[Callable[[], None]]:
        """What was not done yet."""
        return [act for act in self.acts if act.__name__ not in self.did]

    def round(self) -> None:
        """One thing that users do, and now and then the cleaning up; at first each thing in turn."""
        act = (self.untried() or [self.draw.choice((self.train, *self.acts))])[0]
        act()
        self.did[act.__name__] = self.did.get(act.__name__, 0) + 1
        self.clean()

    def workflow(self, steps: int = 10) -> dict[str, Any]:
        """A workflow as it stands after another edit."""
        return trains(self.draw.choice(RUNS), steps, self.draw.randrange(3), self.draw.choice((1e-3, 2e-3)))

    def train(self) -> None:
        """Queue a training and edit what comes after it."""
        entry = self.editor.done(self.workflow(self.draw.choice((3, 10))))
        assert entry["status"]["completed"], entry["status"]

    def stop(self) -> None:
        """The step's own stop button; then it is queued again and goes on."""
        self._broken(lambda run: self.editor.ask(f"/graft/stop?run={run}", "POST", {}))

    def interrupt(self) -> None:
        """The queue's stop button; then it is queued again and goes on."""
        self._broken(lambda run: self.editor.ask("/interrupt", "POST", {}))

    def _broken(self, act: Callable[[str], Any]) -> None:
        prompt = self.workflow(60)
        run = prompt["6"]["inputs"]["run"]
        prompt_id = self.editor.queue(prompt).json["prompt_id"]
        time.sleep(self.draw.uniform(0, 1.0))
        act(run)
        first = self.editor.wait(prompt_id)
        texts = str(first["outputs"].get("7", {}).get("text", ""))
        self.did["broken off"] = self.did.get("broken off", 0) + (
            not first["status"]["completed"] or "stopped at step" in texts
        )
        entry = self.editor.done(prompt)
        assert entry["status"]["completed"], entry["status"]

    def stack(self) -> None:
        """A LoRA stack at some strength, in the weights or at the activations."""
        saved = sorted((self.editor.place / "output" / "loras").glob("*.safetensors"))
        if saved:
            file, strength = f"output/loras/{saved[-1].name}", self.draw.choice((0.3, 0.7, 1.0))
            entry = self.editor.done(stacks(file, strength, self.draw.choice(("merge", "bypass", "auto"))))
            assert entry["status"]["completed"], entry["status"]

    def wrong(self) -> None:
        """Workflows that are refused, and one that fails."""
        assert self.editor.queue({"1": {"class_type": "Nobody", "inputs": {}}}).status == 400
        lost = trains("one", 1, 0, 1e-3)
        lost["2"]["inputs"]["folder"] = "nowhere"
        assert self.editor.queue(lost).status == 400
        outside = trains("../out", 1, 0, 1e-3)
        assert self.editor.queue(outside).status == 400
        with self.damaged_lora() as file:
            assert not self.editor.done(stacks(file, 1.0, "merge"))["status"]["completed"]

    @contextlib.contextmanager
    def damaged_lora(self) -> Iterator[str]:
        """The name of a LoRA whose matrices fit no layer; only the node that reads it can tell."""
        path = self.editor.place / "output" / "loras" / "damaged.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        layer = "diffusion_model.middle_block.1.proj_in"
        save_file({f"{layer}.lora_A.weight": torch.zeros(4, 3), f"{layer}.lora_B.weight": torch.zeros(5, 4)}, path)
        yield f"output/loras/{path.name}"
        path.unlink()

    def pages(self) -> None:
        """Pages that open, listen, and go away without a word."""
        opening = (
            f"GET /ws HTTP/1.1\r\nHost: {self.editor.host}:{self.editor.port}\r\nUpgrade: websocket\r\nConnection:"
            " Upgrade\r\n"
        )
        opening += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        with contextlib.ExitStack() as stack:
            for _ in range(self.draw.randrange(1, 5)):
                page = stack.enter_context(socket.create_connection((self.editor.host, self.editor.port), timeout=30))
                page.sendall(opening.encode())
                assert page.recv(100).startswith(b"HTTP/1.1 101")
            assert self.editor.done(self.workflow(3))["status"]["completed"]

    def files(self) -> None:
        """Saving, loading and looking."""
        for target in (
            "/object_info",
            "/graft/runs",
            "/graft/loras",
            "/history",
            "/userdata?dir=workflows",
            "/system_stats",
        ):
            assert self.editor.ask(target).status == 200
        assert self.editor.ask("/userdata/workflows%2Fmine.json", "POST", self.workflow()).status == 200
        assert self.editor.ask("/userdata/workflows%2Fmine.json").status == 200
        assert self.editor.upload("seen.png", picture(), overwrite="true").status == 200
        assert self.editor.ask("/view?filename=seen.png&type=input&preview=webp;50").status == 200

    def free(self) -> None:
        """Models out of memory, results forgotten."""
        assert self.editor.ask("/free", "POST", {"unload_models": True, "free_memory": True}).status == 200

    def clean(self) -> None:
        """Old pictures and LoRAs are thrown away, and now and then the runs; the history is cleared."""
        place = self.editor.place
        loras = sorted((place / "output" / "loras").glob("*"))[:-3]
        for path in [*(place / "output").glob("*.png"), *loras, *(place / "temp").rglob("*.*")]:
            path.unlink()
        if self.draw.random() < 0.2:
            for run in RUNS:
                shutil.rmtree(place / "output" / "graft" / run, ignore_errors=True)
        self.editor.ask("/history", "POST", {"clear": True})


def verdict(rows: list[Measured]) -> list[str]:
    """What has grown between the first and the last third after warming up, or changed at all."""
    warm = [row for row in rows if row.seconds > WARM * rows[-1].seconds]
    third = max(1, len(warm) // 3)
    wrong = (
        [f"the base's hash has changed: {sorted({row.base for row in rows})}"]
        if len({row.base for row in rows}) > 1
        else []
    )
    for name, allowed in GROWTH.items():
        before, after = (
            statistics.median(getattr(row, name) for row in part) for part in (warm[:third], warm[-third:])
        )
        if after > before + allowed(before):
            wrong.append(f"{name} has grown from {before:,.0f} to {after:,.0f}")
    return wrong


def table(rows: list[Measured]) -> str:
    """Ten lines over the whole time."""
    shown = [rows[round(index * (len(rows) - 1) / 9)] for index in range(10)] if len(rows) > 10 else rows
    lines = [
        f"| {row.seconds / 60:.1f} | {row.memory / 1e6:.0f} | {row.files} | {row.threads} | {row.disk / 1e6:.2f} |"
        f" {row.base[:12]} |"
        for row in shown
    ]
    return "\n".join(
        ["| minutes | memory MB | open files | threads | disk MB | base |", "|---|---|---|---|---|---|", *lines]
    )


def soak(minutes: float, seed: int) -> int:
    """Do everything once, and work for so long; 0 when nothing has grown."""
    with tempfile.TemporaryDirectory(prefix="graft-soak-") as folder:
        editor = Editor(Path(folder))
        user, rows, begun, told, rounds = User(editor, seed), list[Measured](), time.monotonic(), 0.0, 0
        try:
            editor.draw_pictures()
            while user.untried() or time.monotonic() - begun < 60 * minutes:
                user.round()
                rounds += 1
                rows.append(editor.measured(begun))
                if rows[-1].seconds - told > 60:
                    told = rows[-1].seconds
                    print(f"{told / 60:.1f} min, {rounds} rounds: {rows[-1]}", flush=True)
        finally:
            status = editor.stop()
        print(
            f"{rounds} rounds in {(time.monotonic() - begun) / 60:.1f} minutes, seed {seed}: {user.did}\n{table(rows)}"
        )
        wrong = verdict(rows) + ([f"the server ended with {status}"] if status else [])
        print("\n".join(wrong) or "nothing has grown or changed")
        return int(bool(wrong))


class HashOfBase:
    """A node that hashes a model's base weights."""

    RETURN_TYPES = ()
    FUNCTION = "run"
    OUTPUT_NODE = True
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}}

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        return float("nan")

    def run(self, model: Any) -> dict[str, Any]:
        from graft_nodes.host.base_weights import base_weights

        hashed = hashlib.sha256()
        for name, tensor in sorted(base_weights(model).items()):
            hashed.update(
                name.encode() + tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        return {"ui": {"text": [hashed.hexdigest()]}}


def serve(arguments: list[str]) -> int:
    """The command line with that node in its host."""
    from graft_nodes.headless import command, hosts

    load = hosts.load_nodes

    def loaded(host: Any) -> None:
        load(host)
        host.nodes.NODE_CLASS_MAPPINGS.update(HashOfBase=HashOfBase)

    hosts.load_nodes = loaded
    return command.main(arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        sys.exit(serve(sys.argv[2:]))
    parser = argparse.ArgumentParser(
        prog="python dev.py soak", description="Hours of work on the embedded host's server."
    )
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.exit(soak(given.minutes, given.seed))
