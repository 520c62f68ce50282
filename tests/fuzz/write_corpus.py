"""Writes the corpus that the fuzzing begins from: python -m graft_nodes.tests.fuzz.write_corpus. Its files are
committed.
"""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from pathlib import Path

import torch
from graft_nodes.ema.decay import EMASettings
from graft_nodes.storage.safetensors import safetensors_bytes
from graft_nodes.tests.training.conftest import Lab
from graft_nodes.training.run import call
from graft_nodes.training.run.loop import Callbacks
from graft_nodes.training.state import begin
from graft_nodes.training.store import saved_states, store
from graft_nodes.training.trainable.settings import AdapterSettings
from PIL import Image

from .damage import CORPUS

DRAWS = torch.Generator().manual_seed(0)


def drawn(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    """Values around 0."""
    return (torch.randn(shape, generator=DRAWS) * 0.1).to(kind)


def loras() -> dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]]:
    """One file of every kind of layer, for the model of `loras.py`."""
    half = torch.bfloat16
    kohya = {
        "lora_unet_to_q.lora_up.weight": drawn(8, 2),
        "lora_unet_to_q.lora_down.weight": drawn(2, 6),
        "lora_unet_to_q.alpha": torch.tensor(1.0),
        "lora_unet_qkv.lora_up.weight": drawn(12, 2, kind=half),
        "lora_unet_qkv.lora_down.weight": drawn(2, 6, kind=half),
        "lora_unet_conv.lora_up.weight": drawn(8, 2, 1, 1),
        "lora_unet_conv.lora_down.weight": drawn(2, 4, 3, 3),
        "lora_unet_conv.alpha": torch.tensor(2.0, dtype=half),
    }
    said = {
        "ss_network_dim": "2",
        "ss_network_alpha": "1",
        "ss_base_model_version": "sd_v1",
        "ss_output_name": "thing",
        "ss_steps": "20",
        "ss_tag_frequency": json.dumps({"10_thing": {"red circle": 4, "zorp": 2}}),
        "modelspec.trigger_phrase": "zorp",
        "modelspec.resolution": "512x512",
        "ss_todo_factor": "2",
        "ss_ema_decay": "0.99",
    }
    peft = {
        f"transformer.{part}.lora_{side}.weight": drawn(*shape)
        for part in "qkv"
        for side, shape in (("A", (2, 6)), ("B", (4, 2)))
    }
    settings = {
        "transformer.r": 2,
        "transformer.lora_alpha": 4,
        "transformer.rank_pattern": {"q": 2},
        "transformer.alpha_pattern": {"k|v": 8},
    }
    mid = {
        "lycoris_conv.lora_up.weight": drawn(8, 2, 1, 1),
        "lycoris_conv.lora_mid.weight": drawn(2, 2, 3, 3),
        "lycoris_conv.lora_down.weight": drawn(2, 4, 1, 1),
    }
    loha = {
        f"lora_unet_to_q.hada_w{n}_{side}": drawn(*shape)
        for n in "12"
        for side, shape in (("a", (8, 2)), ("b", (2, 6)))
    }
    lokr = {
        "lora_unet_to_q.lokr_w1": drawn(2, 2),
        "lora_unet_to_q.lokr_w2": drawn(4, 3),
        "lora_unet_qkv.lokr_w1_a": drawn(3, 1),
        "lora_unet_qkv.lokr_w1_b": drawn(1, 2),
        "lora_unet_qkv.lokr_w2": drawn(4, 3),
    }
    dora = {
        **{key: tensor for key, tensor in kohya.items() if "to_q" in key},
        "lora_unet_to_q.dora_scale": drawn(8, 1) + 1,
    }
    turned = {
        "lora_unet_to_q.oft_blocks": drawn(2, 4, 4),
        "transformer.q.oft_R.weight": drawn(2, 3),
        "lora_unet_qkv.oft_diag": drawn(3, 4, 4),
        "to_q.boft_R": drawn(1, 3, 2, 2),
        "to_q.boft_s": drawn(8, 1) + 1,
    }
    glora = {
        "lora_unet_to_q.a1.weight": drawn(2, 6),
        "lora_unet_to_q.a2.weight": drawn(6, 2),
        "lora_unet_to_q.b1.weight": drawn(2, 6),
        "lora_unet_to_q.b2.weight": drawn(8, 2),
    }
    whole = {
        "diffusion_model.to_q.diff": drawn(8, 6),
        "diffusion_model.to_q.diff_b": drawn(8),
        "diffusion_model.norm.w_norm": drawn(8),
        "diffusion_model.norm.b_norm": drawn(8),
        "diffusion_model.conv.set_weight": drawn(8, 4, 3, 3),
    }
    ia3 = {
        "lora_unet_to_q.weight": drawn(8, 1),
        "lora_unet_to_q.on_input": torch.tensor(False),
        "transformer.qkv.ia3_l": drawn(12, 1),
    }
    odd = {
        "lora_unet_to_q.diff": torch.zeros(0, 6),
        "lora_te_x.lora_up.weight": drawn(2, 1).half(),
        "lora_te_x.lora_down.weight": drawn(1, 2),
        "count": torch.arange(3),
        "yes": torch.tensor(True),
    }
    return {
        "kohya": (kohya, said),
        "peft": (peft, {"lora_adapter_metadata": json.dumps(settings)}),
        "tucker": (mid, {}),
        "loha": (loha, {}),
        "lokr": (lokr, {}),
        "dora": (dora, {}),
        "rotations": ({k: v for k, v in turned.items() if "oft_blocks" in k or "diag" in k}, {}),
        "peft_oft": (
            {k: v for k, v in turned.items() if "oft_R" in k},
            {"adapter_config": json.dumps({"r": 2, "coft": True, "eps": 1e-3})},
        ),
        "peft_boft": ({k: v for k, v in turned.items() if "boft" in k}, {}),
        "glora": (glora, {}),
        "whole": (whole, {}),
        "ia3": (ia3, {}),
        "odd": (odd, {}),
        "empty": ({}, {}),
    }


def states(place: Path) -> dict[str, bytes]:
    """The files of a run's folder and of a state saved in shards, by relative name."""
    store.BLOCK = 3
    denoiser, dataset = Lab.Flow(), Lab.pictures(held_out=[9])
    adapter = AdapterSettings(targets="all", rank=1, pattern="blocks.0.ff")
    plain = Lab.state(denoiser, dataset, adapter, ema=False, optimizer="sgd")
    ema = EMASettings("ramp", snapshots=2, widths=(0.1, 0.2))
    start = begin(denoiser.module, type(plain.start)("model", dataset.digest, adapter, ema, 3), plain.settings)
    kept = store.Store(place, "run", {"torch": "1"})
    outcome = call.run(
        start, 4, lambda: nullcontext(denoiser), dataset, kept, Callbacks(validate_every=2, snapshot_every=3)
    )
    saved_states.save(outcome.state, place, "saved", 60, {"torch": "1"})
    return {
        path.relative_to(place).as_posix(): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()
    }


def pictures() -> dict[str, bytes]:
    """Small pictures of every format and mode."""
    found = {}
    for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16", "CMYK"):
        for suffix, kind in (
            (".png", "PNG"),
            (".jpg", "JPEG"),
            (".webp", "WEBP"),
            (".gif", "GIF"),
            (".bmp", "BMP"),
            (".avif", "AVIF"),
        ):
            if (mode, kind) in (
                ("RGB", "AVIF"),
                ("RGBA", "WEBP"),
                ("P", "GIF"),
                ("RGB", "BMP"),
                ("CMYK", "JPEG"),
                ("L", "JPEG"),
            ) or (kind == "PNG" and mode != "CMYK"):
                size = (24, 16) if mode != "L" else (16, 24)
                picture = Image.linear_gradient("L").resize(size).convert("RGB" if mode in ("I;16",) else mode)
                picture = Image.new("I;16", size, 40000) if mode == "I;16" else picture
                out, exif = io.BytesIO(), Image.Exif()
                exif[0x0112] = 6
                picture.save(
                    out, format=kind, **({"exif": exif.tobytes()} if kind in ("JPEG", "PNG") and mode != "1" else {})
                )
                found[f"{mode.replace(';', '-')}{suffix}".lower()] = out.getvalue()
    return found


def texts() -> dict[str, bytes]:
    """Captions, LunNova's JSON and EveryDream2's YAML."""
    return {
        "plain.txt": b"a red circle, zorp\n",
        "wild.txt": b"{a|b {c|d}} __a__, __c/d__ {{x}}\n",
        "lines.txt": "first line\n\nsecond \u2013 line {a|b}\n".encode(),
        "old.txt": "caf\u00e9, na\u00efve".encode("cp1252"),
        "mark.txt": b"\xef\xbb\xbfwith a mark",
        "wide.txt": "wide".encode("utf-16"),
        "empty.txt": b"",
        "tags.json": json.dumps({"tags": ["red", "circle"], "score": 55, "path": "rgb.png"}).encode(),
        "words.json": json.dumps({"tags": "red, circle", "score": 5.5}).encode(),
        "list.json": b"[1, 2]",
        "one.yaml": b"main_prompt: a circle\ntags:\n  - tag: red\n    weight: 2.0\n  - round\nmultiply: 1.5\n"
        b"cond_dropout: 0.1\nflip_p: 0.5\n",
        "local.yaml": b"multiply: 2\nshuffle_tags: true\nbatch_id: a\nloss_scale: 0.5\nmax_caption_length: 20\n",
        "filters.yaml": b"consider_every_nth: 1\nblacklist_tags: [a]\nreplacements: {red: blue}\nmin_score: 3\n"
        b"tag_bonus_scores: {red: 2}\nmasks: both\n",
        "multiply.txt": b"0.5",
        "laughs.yaml": b"main_prompt: &a [x, x]\n"
        + b"".join(
            f"tags{i}: &{b} [{', '.join([f'*{a}'] * 9)}]\n".encode()
            for i, (a, b) in enumerate(zip("abcdefghijk", "bcdefghijkl", strict=True))
        )
        + b"batch_id: *l\n",
        "merged.yaml": b"a: &a {multiply: 1}\n"
        + b"".join(
            f"k{i}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}\n".encode()
            for i, (a, b) in enumerate(zip("abcdefghijk", "bcdefghijkl", strict=True))
        )
        + b"<<: *l\n",
    }


def main() -> None:
    """Write every file."""
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        kinds = {
            "loras": {
                f"{name}.safetensors": b"".join(safetensors_bytes(*content)) for name, content in loras().items()
            },
            "states": {name.replace("/", "__"): body for name, body in states(Path(place)).items()},
            "pictures": pictures(),
            "texts": texts(),
        }
    for kind, found in kinds.items():
        (CORPUS / kind).mkdir(parents=True, exist_ok=True)
        for old in (CORPUS / kind).iterdir():
            old.unlink()
        for name, body in found.items():
            (CORPUS / kind / name).write_bytes(body)


if __name__ == "__main__":
    main()
