"""How long trainers take until the same held-out loss: Train Step with the Training Recipe's settings, ComfyUI's own
Train LoRA, and a plain loop of diffusers + PEFT.

python benchmarks/until_loss.py --comfyui DIR [--models demo,66M] [--steps 250] [--marks 25] [--json FILE]

All teach the demo's concept to the same frozen model: the demo's own, and a UNet of 66M random weights, which learns
to take away noise at the same time. Each trains in a process of its own with one thread, from nothing, and keeps its
LoRA at `--marks` moments. Afterwards one and the same function measures the loss of every LoRA, put on the model as
files of that trainer are, on pictures that no run has seen. The clock is the process's own (its processor time), so
other work on the machine changes little, and it stands still while a LoRA is kept.

The others train twice: with the rank and rate that their own node or script has by default, and with the recipe's.
The batch size is the recipe's for all. The loss that counts is the one that the better run of diffusers + PEFT ends
with; a trainer's time is where the line through its marks first comes down to it. Needs diffusers and peft (extra
`test`).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

import training

MODELS = ("demo", "66M")
GOAL = "concept"
UNSEEN = 12  # pictures that no run sees
OURS = "Graft, as the recipe"
RIVALS = ("ComfyUI", "diffusers + PEFT")
ATTENTION = ["to_k", "to_q", "to_v", "to_out.0"]  # of diffusers' train_text_to_image_lora.py


@dataclass(frozen=True)
class Given:
    """Settings of a LoRA training that every trainer has."""

    rank: int
    rate: float
    batch: int


# (rank, rate) of ComfyUI 0.33's Train LoRA, and of diffusers' examples/text_to_image/train_text_to_image_lora.py.
DEFAULTS = {"ComfyUI": (8, 5e-4), "diffusers + PEFT": (4, 1e-4)}


@dataclass
class Marks:
    """Keeps LoRAs at some steps, with the time that training took until there."""

    folder: Path
    every: int
    begun: float = 0.0
    outside: float = 0.0  # seconds that the clock stood still
    seconds: list[float] = field(default_factory=list)

    def begin(self) -> None:
        """Start the clock."""
        self.begun = time.process_time()

    def after(self, step: int, lora: Callable[[], dict[str, Tensor]]) -> None:
        """After a step: keep the LoRA if this is a mark."""
        if step % self.every:
            return
        from safetensors.torch import save_file

        now = time.process_time()
        self.seconds.append(now - self.begun - self.outside)
        kept = {name: tensor.detach().float().contiguous().clone() for name, tensor in lora().items()}
        save_file(kept, str(self.folder / f"{step}.safetensors"))
        self.outside += time.process_time() - now


def material(name: str) -> tuple[Any, Any, Any]:
    """(MODEL, dataset that is trained, dataset that no run sees) on the open host."""
    from dataclasses import replace

    from graft_nodes.demo import draw, host_model, score
    from graft_nodes.demo.encode_dataset import encode_dataset
    from graft_nodes.training.data.dataset import Conditioning, Dataset
    from graft_nodes.training.data.stored_latent import read_latent

    model, clip, vae = host_model.demo_model(str(score.BASE))
    seen, unseen = (encode_dataset(clip, vae, draw.concept(seed)) for seed in (0, 1))
    if name == "66M":
        model = training.unet(name, training.CPU)
        scale = model.model.latent_format.scale_factor

        def widened(data: Any) -> Any:
            """The same for a model of four channels and twice the width of text."""
            latents = [read_latent(image.latent) / scale for image in data.images]
            four = [torch.cat([latent, latent.mean(0, keepdim=True)]) for latent in latents]
            texts = {text: Conditioning(one.context.repeat(1, 1, 2)) for text, one in data.conditionings.items()}
            return Dataset.from_latents(four, [image.caption for image in data.images], texts)

        seen, unseen = widened(seen), widened(unseen)
    return model, seen, replace(unseen, held_out=unseen.images[:UNSEEN])


def recipe_of(model: Any, data: Any, steps: int, strength: str) -> Any:
    """What Training Recipe chooses on this machine."""
    from graft_nodes import host
    from graft_nodes.host.device_memory import training_device
    from graft_nodes.patches.models.registry import recognize_model
    from graft_nodes.training.recipes.choose import recipe
    from graft_nodes.training.recipes.facts import facts_of, pictures_of
    from graft_nodes.training.recipes.wish import Wish

    module = model.model.diffusion_model
    prediction = host.model_sampling.prediction_type(model.get_model_object("model_sampling"))
    facts = facts_of(module, recognize_model(module), prediction)
    return recipe(facts, Wish(GOAL, strength=strength, steps=steps), training_device(model), pictures_of(data))


def graft(model: Any, data: Any, steps: int, marks: Marks, strength: str) -> None:
    """Train Step with the recipe's settings; what Save LoRA saves is the average."""
    from graft_nodes import host
    from graft_nodes.training.run.loop import Callbacks, train
    from graft_nodes.training.state import Settings, Start, begin

    chosen = recipe_of(model, data, steps, strength)
    marks.begin()
    start = Start(model.patches_uuid.hex, data.digest, chosen.adapter, chosen.ema)
    state = begin(model.model.diffusion_model, start, Settings(chosen.optimizer, chosen.objective))
    with host.denoiser.open_denoiser(model) as denoiser:
        for step in range(marks.every, steps + 1, marks.every):
            state = train(state, denoiser, data, marks.every, Callbacks())
            marks.after(step, functools.partial(state.lora_model, ema=True))


def comfyui(model: Any, data: Any, steps: int, marks: Marks, given: Given) -> None:
    """ComfyUI's own node, with its defaults but for `given`."""
    import inspect

    import comfy_extras.nodes_train as nodes
    from graft_nodes.training.data.stored_latent import read_latent

    node = nodes.TrainLoraNode
    texts = data.conditionings
    latents = {"samples": torch.stack([read_latent(image.latent) for image in data.images])}
    positive = [[[texts[image.caption].context, {}]] for image in data.images]
    defaults = {one.id: getattr(one, "default", None) for one in node.define_schema().inputs}
    defaults |= {"training_dtype": "fp32", "lora_dtype": "fp32"}  # the model is float32
    wanted = {"model": model, "latents": latents, "batch_size": given.batch, "steps": steps}
    wanted |= {"learning_rate": given.rate, "rank": given.rank, "seed": 0}
    names = inspect.signature(node.execute).parameters
    listed = {name: [value] for name, value in {**defaults, **wanted}.items() if name in names}
    done = 0
    lora: dict[str, Tensor] = {}
    create = nodes._create_optimizer

    def noted(kind: str, parameters: Any, rate: float) -> Any:
        """The node's optimizer; the values that it is given are those of the LoRA by name."""
        lora.update(parameters.mapping)
        return create(kind, parameters, rate)

    def after(*_: Any) -> None:
        nonlocal done
        done += 1
        marks.after(done, lambda: lora)

    nodes._create_optimizer = noted
    hook = register_optimizer_step_post_hook(after)
    try:
        marks.begin()
        node.execute(**{**listed, "positive": positive})
    finally:
        hook.remove()
        nodes._create_optimizer = create


def diffusers_unet(model: Any) -> Any:
    """diffusers' UNet with the weights of ComfyUI's."""
    import diffusers
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    module = model.model.diffusion_model
    shape = model.model.model_config.unet_config
    depths = shape["transformer_depth"]
    kinds = ["CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths]
    config = {
        "in_channels": shape["in_channels"],
        "out_channels": shape["out_channels"],
        "block_out_channels": tuple(shape["model_channels"] * factor for factor in shape["channel_mult"]),
        "layers_per_block": 1,
        "cross_attention_dim": shape["context_dim"],
        "attention_head_dim": shape["num_heads"],  # heads, as the configs of SD 1.x count them
        "use_linear_projection": shape["use_linear_in_transformer"],
        "down_block_types": tuple(kinds),
        "up_block_types": tuple(kind.replace("Down", "Up") for kind in reversed(kinds)),
    }
    unet = diffusers.UNet2DConditionModel(**config)
    named = {f"model.diffusion_model.{key}": tensor.detach().clone() for key, tensor in module.state_dict().items()}
    converted = convert_ldm_unet_checkpoint(named, {**config, "class_embed_type": None, "addition_embed_type": None})
    unet.load_state_dict(converted)
    return unet.requires_grad_(False).eval()


def peft(model: Any, data: Any, steps: int, marks: Marks, given: Given) -> None:
    """The loop of diffusers' example, with PEFT's LoRA and AdamW, on the same weights, noise schedule and latents."""
    import peft as library
    import torch.nn.functional as F
    from graft_nodes.training.data.stored_latent import read_latent

    unet = diffusers_unet(model)
    sampling = model.get_model_object("model_sampling")
    is_flow = not hasattr(sampling, "log_sigmas")
    latents = torch.stack([read_latent(image.latent) for image in data.images])
    latents = model.model.process_latent_in(latents)
    texts = torch.cat([data.conditionings[image.caption].context for image in data.images])
    sigmas = sampling.sigmas

    def noised(clean: Tensor, noise: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(what the model sees, its timesteps, what it has to say)."""
        sigma = sigmas[level].view(-1, 1, 1, 1)
        timesteps = sampling.timestep(sigmas[level])
        if is_flow:
            return (1 - sigma) * clean + sigma * noise, timesteps, noise - clean
        return (clean + sigma * noise) / (sigma**2 + 1) ** 0.5, timesteps, noise

    _check_same(model, unet, texts[:1], noised, latents[:1])
    torch.manual_seed(0)
    marks.begin()
    unet.add_adapter(library.LoraConfig(r=given.rank, lora_alpha=given.rank, target_modules=ATTENTION))
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=given.rate, weight_decay=1e-2)
    for step in range(1, steps + 1):
        chosen = torch.randint(len(latents), (given.batch,))
        clean = latents[chosen]
        noise, level = torch.randn_like(clean), torch.randint(len(sigmas), (given.batch,))
        seen, timesteps, target = noised(clean, noise, level)
        loss = F.mse_loss(unet(seen, timesteps, texts[chosen]).sample, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        marks.after(
            step,
            lambda: {f"unet.{name}": part for name, part in library.get_peft_model_state_dict(unet).items()},
        )


def _check_same(model: Any, unet: Any, text: Tensor, noised: Any, latent: Tensor) -> None:
    """Raise RuntimeError unless both UNets say the same."""
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(1))
    seen, timesteps, _ = noised(latent, noise, torch.tensor([500]))
    with torch.no_grad():
        own = model.model.diffusion_model(seen, timesteps, context=text)
        theirs = unet(seen, timesteps, text).sample
    error = float((own - theirs).norm() / own.norm())
    if not error < 1e-4:
        raise RuntimeError(f"diffusers' UNet is not ComfyUI's: {error:.2g}")


def losses_of(folder: Path, model: Any, unseen: Any) -> Iterator[tuple[int, float]]:
    """(step, held-out loss) of every LoRA in a folder; step 0 is the model without one."""
    import concept
    from graft_nodes.training.state import Settings, Start, begin
    from graft_nodes.training.trainable.settings import AdapterSettings
    from safetensors.torch import load_file
    from todo_quality import held_out_loss

    files = sorted(folder.glob("*.safetensors"), key=lambda path: int(path.stem))
    for step, file in [(0, None), *((int(path.stem), path) for path in files)]:
        taught = model if file is None else concept.applied(model, load_file(str(file)))
        start = Start("held out", unseen.digest, AdapterSettings(rank=1))
        state = begin(model.model.diffusion_model, start, Settings())
        yield step, held_out_loss(taught, state, unseen)


def child(options: argparse.Namespace) -> None:
    """Train, or measure, in this process, and print the result."""
    what, name, folder, *rest = options.child
    torch.set_num_threads(1)
    training.open_host(options.comfyui, training.CPU)
    model, data, unseen = material(name)
    if what == "recipe":
        chosen = recipe_of(model, data, options.steps, *rest)
        print(json.dumps([chosen.adapter.rank, chosen.optimizer.learning_rate, chosen.optimizer.batch_size]))
        return
    if what == "measure":
        print(json.dumps(list(losses_of(Path(folder), model, unseen))))
        return
    marks = Marks(Path(folder), options.steps // options.marks)
    with torch.inference_mode(False):
        if what == "Graft":
            graft(model, data, options.steps, marks, *rest)
        else:
            given = Given(int(rest[0]), float(rest[1]), int(rest[2]))
            {"ComfyUI": comfyui, "diffusers + PEFT": peft}[what](model, data, options.steps, marks, given)
    print(json.dumps(marks.seconds))


def asked(options: argparse.Namespace, *arguments: object) -> Any:
    """What a process of its own answers."""
    command = [sys.executable, __file__, "--comfyui", options.comfyui, "--steps", str(options.steps)]
    command += ["--marks", str(options.marks), "--child", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, arguments))} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def until(curve: list[tuple[float, float]], loss: float) -> float | None:
    """The seconds after which a curve of (seconds, loss) first comes down to a loss; None if it does not."""
    before = curve[0]
    for now in curve[1:]:
        if now[1] <= loss:
            share = (before[1] - loss) / (before[1] - now[1])
            return before[0] + share * (now[0] - before[0])
        before = now
    return None


def curves_of(options: argparse.Namespace, name: str) -> dict[str, list[tuple[float, float]]]:
    """Every trainer's curve of (seconds, held-out loss)."""
    chosen = Given(*asked(options, "recipe", name, "-", "normal"))
    runs: dict[str, tuple[Any, ...]] = {OURS: ("Graft", "normal"), f"{OURS}, strength strong": ("Graft", "strong")}
    for rival in RIVALS:
        runs[f"{rival}, its own rank and rate"] = (rival, *DEFAULTS[rival], chosen.batch)
        runs[f"{rival}, as the recipe"] = (rival, chosen.rank, chosen.rate, chosen.batch)
    curves = {}
    for title, (what, *given) in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            seconds = asked(options, what, name, folder, *given)
            losses = asked(options, "measure", name, folder)
        curves[title] = [(when, loss) for when, (_, loss) in zip([0.0, *seconds], losses, strict=True)]
        said = " ".join(f"{when:.1f}:{loss:.4f}" for when, loss in curves[title][:: max(1, options.marks // 8)])
        print(f"{name}, {title} {given}: {said}", flush=True)
    return curves


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", required=True, metavar="DIR")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--marks", type=int, default=25)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    options.comfyui = str(Path(options.comfyui).expanduser().resolve())
    rows = []
    for name in options.models.split(","):
        curves = curves_of(options, name)
        loss = min(curve[-1][1] for title, curve in curves.items() if title.startswith("diffusers"))
        ours = until(curves[OURS], loss)
        print(f"\n{name}: until a held-out loss of {loss:.4f}, from {curves['Graft, as the recipe'][0][1]:.4f}\n")
        print("| trainer | seconds | times Graft's |\n|---|---:|---:|")
        for title, curve in curves.items():
            seconds = until(curve, loss)
            ratio = seconds / ours if seconds and ours else None
            said = f"{seconds:.1f}" if seconds else f"not in {curve[-1][0]:.0f}: {curve[-1][1]:.4f}"
            print(f"| {title} | {said} | {f'{ratio:.2f}' if ratio else ''} |", flush=True)
            rows.append({"name": f"{name}: {title}", "value": seconds, "unit": "s", "ratio": ratio, "curve": curve})
    print(f"\n{platform.machine()}, one thread, torch {torch.__version__}, processor time")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
