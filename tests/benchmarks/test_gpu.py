"""`python dev.py gpu`, tried on the CPU and the second device at tiny sizes: every part runs, and both files say what
came out.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_parts.registry import PARTS

ROOT = Path(__file__).resolve().parents[2]
ON_A_GPU = {"compile": "bypass", "stack": "fp8, 8 LoRAs", "todo": "tiny 128 px, train"}  # a case of some parts
NO_COMFYUI = {
    "ComfyUI's own trainer": "there is no ComfyUI checkout: name one with --comfyui or COMFYUI_PATH",
    "ComfyUI's own trainer, bypass": "there is no ComfyUI checkout: name one with --comfyui or COMFYUI_PATH",
}
SHARDED = "training with sharded weights (FSDP2)"
NO_RANKS = "ranks run on CUDA (NCCL) and on CPUs (gloo), not on second"
RANKS = ("collectives", "training as one process", SHARDED, "several ranks")
PAGED = ("LoRA and text encoder over two Train Steps", "a LoRA stack on a paged model")
NO_FLUX = "there is no ComfyUI checkout, and the embedded host has no Flux: name one with --comfyui"
NO_PAGES = "there is no ComfyUI checkout: name one of 0.33 or later with --comfyui or COMFYUI_PATH"
FLUX = dict.fromkeys(("bf16", "fp8", "int8", "nf4"), NO_FLUX)
NOT_HERE = {  # what a device cannot do on the embedded host
    "cpu": {
        SHARDED: "it is tried with two GPUs or more; the tests of training/distributed try it on the CPU",
        "fp16 beside a bare loop": "no model is loaded in fp16 on a CPU",
        "waits and idle time": "nothing waits for the CPU",
        "copies and overlap": "weights are on the CPU already",
        "pinned memory": "copies to the CPU need no pinned memory",
        "a preview in mid-run": "a CPU's memory is everyone's",
        "memory that runs out": "a CPU's memory is everyone's",
        **dict.fromkeys(PAGED, "ComfyUI pages no model that computes on the CPU"),
        **FLUX,
    },
    "second": {**dict.fromkeys(RANKS, NO_RANKS), **dict.fromkeys(PAGED, NO_PAGES), **FLUX},
}


def gpu(*arguments, **environment):
    """The command, ended."""
    command = [sys.executable, str(ROOT / "dev.py"), "gpu", *arguments]
    known = {**os.environ, "COMFYUI_PATH": "", "HOME": "/nonexistent", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=ROOT, env=known, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module", params=["cpu", "second"])
def tried(request, tmp_path_factory):
    """(the device, what the command printed, gpu.json, gpu.md)."""
    folder = tmp_path_factory.mktemp("gpu")
    done = gpu("--device", request.param, "--tiny", "--minutes", "60", "--out", str(folder))
    found = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))
    failed = [case for part in found["parts"] for case in part["cases"] if case["status"] not in ("done", "x")]
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:], [case["error"] for case in failed])
    return request.param, done.stdout, found, (folder / "gpu.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_every_part_runs(tried):
    device, _, found, _ = tried
    assert [part["name"] for part in found["parts"]] == [part.name for part in PARTS]
    missing = {}
    for part in found["parts"]:
        for case in part["cases"]:
            if case["status"] != "done":
                missing[case["name"]] = case["reason"]
            rows = case["rows"]
            assert rows or case["status"] != "done", case
            assert all(math.isfinite(row["value"]) and row["name"] and row["bound"] for row in rows), case
    assert missing == NO_COMFYUI | NOT_HERE[device]
    cases = {part["name"]: [case["name"] for case in part["cases"]] for part in found["parts"]}
    assert all(name in cases[part] for part, name in ON_A_GPU.items()), cases


@pytest.mark.long
def test_the_files_say_what_ran_where(tried):
    device, printed, found, table = tried
    assert (
        found["device"].partition(":")[0] == device and found["python"] == sys.executable and "not run yet" not in found
    )
    assert sys.executable in printed and "gpu.md" in printed
    assert table.startswith(f"# Graft on {found['device']}\n") and "the numbers say nothing" in table
    assert all(f"(`{part.name}`)" in table for part in PARTS)
    assert "| not on this device | training: ComfyUI's own trainer | there is no ComfyUI checkout" in table


@pytest.mark.slow
def test_one_part_alone(tmp_path):
    done = gpu("lane", "--device", "cpu", "--tiny", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert [part["name"] for part in found["parts"]] == ["lane"]


@pytest.mark.long
def test_what_needs_a_real_comfyui(tmp_path):
    """Dynamic VRAM and Flux' width, on the second device."""
    folders = os.environ.get("COMFYUI_PATH", os.path.expanduser("~/ComfyUI")).split(os.pathsep)
    found = [folder for folder in folders if "ModelPatcherDynamic" in read_patcher(Path(folder).expanduser())]
    if not found:
        pytest.skip("no ComfyUI with dynamic VRAM found; set COMFYUI_PATH to a checkout of 0.33 or later")
    parts = ("paged", "flux", "step")
    done = gpu(*parts, "--device", "second", "--tiny", "--comfyui", found[0], "--minutes", "60", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout[-3000:]
    cases = [case for part in json.loads((tmp_path / "gpu.json").read_text())["parts"] for case in part["cases"]]
    assert {case["status"] for case in cases} == {"done"} and {*PAGED, *FLUX} <= {case["name"] for case in cases}


def read_patcher(folder):
    """The text of a checkout's model_patcher.py; empty where there is none."""
    path = folder / "comfy" / "model_patcher.py"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@pytest.mark.slow
def test_without_a_gpu_it_says_so(tmp_path):
    done = gpu("--out", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "sees no CUDA device" in done.stderr and "--device cpu --tiny" in done.stderr


def test_a_part_that_is_not_there_and_a_wrong_checkout(tmp_path):
    done = gpu("stak")
    assert done.returncode == 2 and "stak: no such part; the parts are step, paged, stack" in done.stderr
    done = gpu("lane", "--comfyui", str(tmp_path), "--out", str(tmp_path))
    assert done.returncode == 1 and "is not a ComfyUI checkout" in done.stderr
