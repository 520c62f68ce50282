"""Writes the templates: `python example_workflows/write_templates.py`, after a change of the blueprint or of a node's
inputs. The pictures beside them: `python -m graft_nodes.tests.editor.template_pictures`.

"Train your first LoRA" is the blueprint on the demo model, also as a form in the editor's app mode. "See what your
LoRAs do" measures and compares the rows of a stack on the demo model. "Train a word without a LoRA" trains an embedding
alone on it. "Teach the demo model what you prefer" trains on pairs of images, "Repair a VAE's decoder" a small VAE,
"Train a slider" a color that follows the strength. "Train on images from the graph" needs no folder: the model draws
what a new word is trained on. "Train on several folders" has two with settings of their own. "A stack of LoRAs, merged
or bypassed" and "Sample faster with ToDo" draw with and without. "Train a LoRA for …" loads a published model of one
family, with Training Recipe, previews and Save LoRA; a distilled one with its training adapter, and Wan 2.2 with both
of its models.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft_nodes.example_workflows.layout import LANES, Graph

HERE = Path(__file__).resolve().parent
BLUEPRINT = HERE.parent / "subgraphs" / "Train a LoRA (Graft).json"
FIRST = "Train your first LoRA"
LORAS = "See what your LoRAs do"
WORDS = "Train a word without a LoRA"
SLIDER = "Train a slider"
PREFERENCE = "Teach the demo model what you prefer"
DECODER = "Repair a VAE's decoder"
SAMPLES = "Train on images from the graph"
FOLDERS_TITLE = "Train on several folders"
STACK_TITLE = "A stack of LoRAs, merged or bypassed"
TODO_TITLE = "Sample faster with ToDo"
DEMO_LORA = "graft_demo/zorp.safetensors"
SECOND_LORA = "graft_demo/mauve.safetensors"


@dataclass(frozen=True)
class Family:
    """What a template names for one model family: `files` are (loader, {input: value}), its model first, then its text
    encoders and VAE. `training_only` is the training adapter of a distilled model. `low_noise_model` is the second
    model of a pair, whose first is in `files`. `frames` and `frame_rate` are for clips.
    """

    title: str
    files: tuple[tuple[str, dict[str, str]], ...]
    resolution: int
    steps: int = 20
    cfg: float = 4.0
    scheduler: str = "simple"
    guided_previews: bool = True
    training_only: str = ""
    control_pictures: str = ""
    low_noise_model: str = ""
    frames: str = "0"
    frame_rate: float = 0.0


def _separate(model: str, text_encoders: tuple[str, dict[str, str]], vae: str) -> tuple[Any, ...]:
    """A diffusion model, its text encoders and its VAE in files of their own."""
    loader = ("UNETLoader", {"unet_name": model, "weight_dtype": "default"})
    return loader, text_encoders, ("VAELoader", {"vae_name": vae})


def _one_encoder(file: str, kind: str) -> tuple[str, dict[str, str]]:
    return "CLIPLoader", {"clip_name": file, "type": kind, "device": "default"}


FLUX_ENCODERS = {
    "clip_name1": "clip_l.safetensors",
    "clip_name2": "t5xxl_fp16.safetensors",
    "type": "flux",
    "device": "default",
}
FAMILIES = (
    Family(
        "SD 1.5",
        (("CheckpointLoaderSimple", {"ckpt_name": "v1-5-pruned-emaonly-fp16.safetensors"}),),
        resolution=512,
        cfg=7.0,
        scheduler="normal",
    ),
    Family(
        "SDXL",
        (("CheckpointLoaderSimple", {"ckpt_name": "sd_xl_base_1.0.safetensors"}),),
        resolution=1024,
        steps=25,
        cfg=7.0,
        scheduler="normal",
    ),
    Family(
        "Flux.1",
        _separate("flux1-dev.safetensors", ("DualCLIPLoader", FLUX_ENCODERS), "ae.safetensors"),
        resolution=1024,
        cfg=1.0,
        guided_previews=False,
    ),
    Family(
        "Flux Kontext",
        _separate("flux1-dev-kontext_fp8_scaled.safetensors", ("DualCLIPLoader", FLUX_ENCODERS), "ae.safetensors"),
        resolution=1024,
        cfg=1.0,
        guided_previews=False,
        control_pictures="Flux Kontext",
    ),
    Family(
        "Qwen-Image",
        _separate(
            "qwen_image_fp8_e4m3fn.safetensors",
            _one_encoder("qwen_2.5_vl_7b_fp8_scaled.safetensors", "qwen_image"),
            "qwen_image_vae.safetensors",
        ),
        resolution=1024,
        cfg=2.5,
    ),
    Family(
        "Qwen-Image-Edit",
        _separate(
            "qwen_image_edit_2509_fp8_e4m3fn.safetensors",
            _one_encoder("qwen_2.5_vl_7b_fp8_scaled.safetensors", "qwen_image"),
            "qwen_image_vae.safetensors",
        ),
        resolution=1024,
        cfg=2.5,
        control_pictures="Qwen-Image-Edit Plus",
    ),
    Family(
        "Z-Image",
        _separate("z_image_bf16.safetensors", _one_encoder("qwen_3_4b.safetensors", "lumina2"), "ae.safetensors"),
        resolution=1024,
        steps=25,
    ),
    Family(
        "Z-Image Turbo",
        _separate("z_image_turbo_bf16.safetensors", _one_encoder("qwen_3_4b.safetensors", "lumina2"), "ae.safetensors"),
        resolution=1024,
        steps=8,
        cfg=1.0,
        guided_previews=False,
        training_only="zimage_turbo_training_adapter_v2.safetensors",
    ),
    Family(
        "Krea 2 Turbo",
        _separate(
            "krea2_turbo_fp8_scaled.safetensors",
            _one_encoder("qwen3vl_4b_fp8_scaled.safetensors", "krea2"),
            "qwen_image_vae.safetensors",
        ),
        resolution=1024,
        steps=8,
        cfg=1.0,
        guided_previews=False,
        training_only="krea2_turbo_training_adapter_v1.safetensors",
    ),
    Family(
        "Wan",
        _separate(
            "wan2.1_t2v_1.3B_fp16.safetensors",
            _one_encoder("umt5_xxl_fp8_e4m3fn_scaled.safetensors", "wan"),
            "wan_2.1_vae.safetensors",
        ),
        resolution=632,
        steps=30,
        cfg=6.0,
    ),
    Family(
        "Wan (image to video)",
        _separate(
            "wan2.1_i2v_480p_14B_fp16.safetensors",
            _one_encoder("umt5_xxl_fp8_e4m3fn_scaled.safetensors", "wan"),
            "wan_2.1_vae.safetensors",
        ),
        resolution=480,
        cfg=6.0,
        control_pictures="Wan image to video",
        frames="1, 33",
        frame_rate=16.0,
    ),
    Family(
        "Wan 2.2",
        _separate(
            "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors",
            _one_encoder("umt5_xxl_fp8_e4m3fn_scaled.safetensors", "wan"),
            "wan_2.1_vae.safetensors",
        ),
        resolution=632,
        cfg=3.5,
        low_noise_model="wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors",
    ),
)
# Where ComfyUI's own templates, and AI-Toolkit, have each file from: its folder in models/, its place, its size in GB.
HUB, SPLIT = "https://huggingface.co/{place}/resolve/main/{inside}{name}", "split_files/{folder}/"
FLUX_TEXTS, QWEN, ZIMAGE, KREA = (
    "comfyanonymous/flux_text_encoders",
    "Comfy-Org/Qwen-Image_ComfyUI",
    "Comfy-Org/z_image_turbo",
    "Comfy-Org/Krea-2",
)
WAN, WAN_2 = "Comfy-Org/Wan_2.1_ComfyUI_repackaged", "Comfy-Org/Wan_2.2_ComfyUI_Repackaged"
MODEL_FILES = {
    "v1-5-pruned-emaonly-fp16": ("checkpoints", "Comfy-Org/stable-diffusion-v1-5-archive", "", 2.1),
    "sd_xl_base_1.0": ("checkpoints", "stabilityai/stable-diffusion-xl-base-1.0", "", 6.9),
    "flux1-dev": ("diffusion_models", "Comfy-Org/flux1-dev", "", 23.8),
    "clip_l": ("text_encoders", FLUX_TEXTS, "", 0.2),
    "t5xxl_fp16": ("text_encoders", FLUX_TEXTS, "", 9.8),
    "ae": ("vae", "Comfy-Org/Lumina_Image_2.0_Repackaged", SPLIT, 0.3),
    "flux1-dev-kontext_fp8_scaled": ("diffusion_models", "Comfy-Org/flux1-kontext-dev_ComfyUI", SPLIT, 11.9),
    "qwen_image_fp8_e4m3fn": ("diffusion_models", QWEN, SPLIT, 20.4),
    "qwen_2.5_vl_7b_fp8_scaled": ("text_encoders", QWEN, SPLIT, 9.4),
    "qwen_image_vae": ("vae", QWEN, SPLIT, 0.3),
    "qwen_image_edit_2509_fp8_e4m3fn": ("diffusion_models", "Comfy-Org/Qwen-Image-Edit_ComfyUI", SPLIT, 20.4),
    "z_image_bf16": ("diffusion_models", "Comfy-Org/z_image", SPLIT, 12.3),
    "z_image_turbo_bf16": ("diffusion_models", ZIMAGE, SPLIT, 12.3),
    "qwen_3_4b": ("text_encoders", ZIMAGE, SPLIT, 8.0),
    "krea2_turbo_fp8_scaled": ("diffusion_models", KREA, "{folder}/", 13.1),
    "qwen3vl_4b_fp8_scaled": ("text_encoders", KREA, "{folder}/", 5.2),
    "wan2.1_t2v_1.3B_fp16": ("diffusion_models", WAN, SPLIT, 2.8),
    "wan2.1_i2v_480p_14B_fp16": ("diffusion_models", WAN, SPLIT, 32.8),
    "umt5_xxl_fp8_e4m3fn_scaled": ("text_encoders", WAN, SPLIT, 6.7),
    "wan_2.1_vae": ("vae", WAN, SPLIT, 0.3),
    "wan2.2_t2v_high_noise_14B_fp8_scaled": ("diffusion_models", WAN_2, SPLIT, 14.3),
    "wan2.2_t2v_low_noise_14B_fp8_scaled": ("diffusion_models", WAN_2, SPLIT, 14.3),
    "zimage_turbo_training_adapter_v2": ("loras", "ostris/zimage_turbo_training_adapter", "", 0),
    "krea2_turbo_training_adapter_v1": ("loras", "ostris/krea2_turbo_training_adapter", "", 0),
}


def model_file(file: str) -> dict[str, str]:
    """What the editor offers to download of a missing file, as ComfyUI's own templates say it."""
    folder, place, inside, _ = MODEL_FILES[file.removesuffix(".safetensors")]
    return {
        "name": file,
        "url": HUB.format(place=place, inside=inside.format(folder=folder), name=file),
        "directory": folder,
    }


STEPS, PREVIEWS = 1500, 250
CONTROLLED = 655  # height of a Dataset with a few of the advanced settings, which are not their defaults


# --- the first one ----------------------------------------------------------------------------------------------------

FIRST_NOTE = (
    "# Train your first LoRA",
    "Teaches the demo model a word that it does not know, *zorp*, from 16 images. It needs no GPU, and there is nothing"
    " to download: the demo's images are put into `input/graft_demo` if they are not there.",
    "**Press Run.** *Train a LoRA* shows the curve and the previews as they come. It takes a minute or two, saves the"
    " LoRA in `output/loras`, and draws *a zorp middle* before and after. **Stop and keep** stops it; Run continues.",
    "**Your own**: drop a folder of images with captions onto *Train a LoRA*, write what they show into *prompt*, give"
    " it a *run name*, and run again.",
    "In app mode (the button beside *Graph*, at the top left) this is a form without the graph. It shows the curve"
    " while it trains, then the previews, the saved LoRA with a button that downloads it, and the images.",
)
FIRST_ROOM = 817  # height of the blueprint while it trains
FIRST_PREVIEWS = 50  # steps between two previews
FIRST_SETTINGS = {
    "folder": "graft_demo/concept",
    "text": "a zorp middle",
    "resolution": 256,
    "rank": 16,
    "learning_rate": 0.002,
    "batch_size": 8,
    "steps": 250,
    "run": "first",
    "prefix": "loras/first",
}


def first(classes: Mapping[str, Any]) -> dict[str, Any]:
    """The blueprint with its ten settings on the demo model, images before and after, the curve and the saved file."""
    blueprint = json.loads(BLUEPRINT.read_text(encoding="utf-8"))
    graph = Graph(classes, FIRST, first_id=21, lanes=30)  # not an id inside the blueprint
    note = graph.note(FIRST_NOTE, 240)
    demo = graph.add("GraftDemo")
    latent = graph.add("EmptyLatentImage", width=256, height=256, batch_size=4)
    train = _blueprint_node(graph, blueprint, FIRST_ROOM)
    before = _sampled(graph, "Before", "first/before", 280)
    after = _sampled(graph, "After", "first/after", 280)
    curve = graph.add("SaveImage", "Loss", 290, filename_prefix="first/loss")
    file = graph.add("PreviewAny", "Saved file", 140)
    for name, output in (("model", 0), ("clip", 1), ("vae", 2)):
        graph.link(demo, output, train, name)
    graph.link(latent, 0, train, "latent")
    for (sampler, decode, _), model in ((before, (demo, 0)), (after, (train, 0))):
        graph.link(*model, sampler, "model")
        graph.link(train, 4, sampler, "positive")
        graph.link(train, 5, sampler, "negative")
        graph.link(latent, 0, sampler, "latent_image")
        graph.link(demo, 2, decode, "vae")
    graph.link(train, 2, curve, "images")
    graph.link(train, 3, file, "source")
    # the note as high as the groups begin
    graph.column(0, 240, note, graph.head - 50, demo, latent, top=90 - graph.head)
    graph.column(320, 600, train)
    _folded_row(graph, 990, 60, before)
    _folded_row(graph, 1310, 60, after)
    graph.column(990, 270, curve, top=560)
    graph.column(1310, 270, file, top=560)
    graph.group("Model", "#3f789e", demo, latent)
    graph.group("Train: ten settings", "#b58b2a", train)
    graph.group("Before", "#8A8", *before)
    graph.group("After", "#8A8", *after)
    graph.group("The curve, and the saved file", "#8A8", curve, file)
    shown = [slot["name"] for slot in train["inputs"] if "widget" in slot]
    form = {
        "inputs": [[train["id"], name] for name in shown],
        "outputs": [after[2]["id"], curve["id"], *_inside(blueprint, train["id"], "GraftSaveLoRA", "TrainStep")],
    }
    written = graph.document(linearData=form)
    train["size"][1] = 0  # as low as its panels are before it trains
    return {**written, "definitions": _with_previews(blueprint["definitions"])}


def _inside(blueprint: dict[str, Any], outer: int, *kinds: str) -> list[str]:
    """The ids, as a running workflow has them, of these kinds of nodes in the blueprint's subgraph."""
    inner = {node["type"]: node["id"] for node in blueprint["definitions"]["subgraphs"][0]["nodes"]}
    return [f"{outer}:{inner[kind]}" for kind in kinds]


def _with_previews(definitions: dict[str, Any]) -> dict[str, Any]:
    """The blueprint's subgraph with previews while it trains, as here its sockets for them are connected."""
    copied = json.loads(json.dumps(definitions))
    (step,) = (node for node in copied["subgraphs"][0]["nodes"] if node["type"] == "TrainStep")
    named = [slot["name"] for slot in step["inputs"] if "widget" in slot]
    step["widgets_values"][named.index("preview_every")] = FIRST_PREVIEWS
    step["widgets_values_named"]["preview_every"] = FIRST_PREVIEWS
    return copied


def _blueprint_node(graph: Graph, blueprint: dict[str, Any], height: int) -> dict[str, Any]:
    """The blueprint as one node, with FIRST_SETTINGS in its widgets."""
    (node,) = json.loads(json.dumps(blueprint["nodes"]))
    shown = [slot["name"] for slot in node["inputs"] if "widget" in slot]
    saved = dict(zip(shown, node["widgets_values"], strict=True)) | FIRST_SETTINGS
    node["widgets_values"] = [saved[name] for name in shown]
    node["widgets_values_named"] = saved
    return graph.put(node, height)


def _link_samplers(
    graph: Graph,
    pairs: Sequence[tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], int]]],
    demo: dict[str, Any],
    prompt: dict[str, Any],
    negative: dict[str, Any],
    latent: dict[str, Any],
) -> None:
    """Link what (`_sampled`, its model's node and output) draw from: all of them the same prompts, latent and the
    demo's VAE.
    """
    for (sampler, decode, _), (model, output) in pairs:
        graph.link(model, output, sampler, "model")
        for source, name in ((prompt, "positive"), (negative, "negative"), (latent, "latent_image")):
            graph.link(source, 0, sampler, name)
        graph.link(demo, 2, decode, "vae")


def _sampled(graph: Graph, title: str, prefix: str, height: int = 370) -> tuple[dict[str, Any], ...]:
    """KSampler, VAE Decode and Save Image, linked; what the sampler needs is not."""
    settings = {"seed": 7, "steps": 20, "cfg": 2.0, "sampler_name": "euler", "scheduler": "simple"}
    sampler, decode = graph.add("KSampler", **settings), graph.add("VAEDecode")
    save = graph.add("SaveImage", title, height, filename_prefix=prefix)
    graph.link(sampler, 0, decode, "samples")
    graph.link(decode, 0, save, "images")
    return sampler, decode, save


def _row(graph: Graph, left: int, top: int, sampled: tuple[dict[str, Any], ...], width: int = 270) -> int:
    """Place a sampler, and its decoder and picture beside it, as it grows while it draws. Returns the right edge."""
    sampler, *shown = sampled
    return graph.column(graph.column(left, 260, sampler, top=top) + 50, width, *shown, top=top)


def _folded_row(graph: Graph, left: int, top: int, sampled: tuple[dict[str, Any], ...]) -> None:
    """Place a sampler and its decoder as their titles alone, above the picture."""
    sampler, decode, save = sampled
    graph.fold(sampler, decode)
    graph.column(left, 110, sampler, top=top)
    graph.column(left + 150, 120, decode, top=top)
    graph.column(left, 270, save, top=top + 60)


# --- what LoRAs do ----------------------------------------------------------------------------------------------------

LORAS_NOTE = (
    "# See what your LoRAs do",
    "Measures a stack of two LoRAs on the demo model, without a GPU. One draws a *zorp*, a purple ring"
    f" (`{DEMO_LORA}`), the other one paints circles, squares, triangles and crosses *mauve*, in the same purple"
    f" (`{SECOND_LORA}`). They are put into the loras folder if they are not there.",
    "**Press Run.** *LoRA Effect* shows how much each block of each row changes the prediction for *Prompt*, and hands"
    " on the stack with only the blocks that matter. *LoRA Conflicts* shows where the rows cancel or repeat each other:"
    " here they repeat each other in the last output blocks, as both have learned the purple.",
    "The two images are drawn with all blocks and with those that matter. Lower *keep what matters* and run again. A"
    " click in either panel writes its block weights into the rows.",
    "**With your own**: take your model's loaders in place of *Demo Model*, your LoRAs in *LoRA Stack* and"
    " *Load LoRAs*, and their trigger words in *Prompt*.",
)


def loras(classes: Mapping[str, Any]) -> dict[str, Any]:
    """LoRA Effect and LoRA Conflicts on a stack, and images with all of its blocks and with those that matter."""
    graph = Graph(classes, LORAS)
    note = graph.note(LORAS_NOTE, 260)
    demo = graph.add("GraftDemo")
    prompt = graph.add("CLIPTextEncode", "Prompt", text="a zorp left")
    negative = graph.add("CLIPTextEncode", "Negative: nothing", text="")
    latent = graph.add("EmptyLatentImage", width=256, height=256, batch_size=1)
    strengths = {DEMO_LORA: 0.7, SECOND_LORA: 0.6}
    listed = [{"file": file, "on": True, "model": given, "clip": given} for file, given in strengths.items()]
    rows = json.dumps({"version": 1, "rows": listed})
    stack = graph.add("GraftLoRAStack", rows=rows)
    effect = graph.add("GraftLoRAEffect")
    conflicts = graph.add("GraftLoRAConflicts")
    whole = graph.add("GraftLoadLoRAs", rows=rows)
    kept = graph.add("LoRAStackPatch")
    with_all = _sampled(graph, "All blocks", "loras/all")
    with_kept = _sampled(graph, "The blocks that matter", "loras/kept")
    for text in (prompt, negative):
        graph.link(demo, 1, text, "clip")
    for node in (effect, conflicts, whole, kept):
        graph.link(demo, 0, node, "model")
    for node in (effect, conflicts):
        graph.link(stack, 0, node, "lora_stack")
    graph.link(prompt, 0, effect, "positive")
    graph.link(latent, 0, effect, "latent")
    graph.link(effect, 0, kept, "lora_stack")
    for node in (whole, kept):
        graph.link(demo, 1, node, "clip")
    _link_samplers(graph, ((with_all, (whole, 0)), (with_kept, (kept, 0))), demo, prompt, negative, latent)
    graph.column(0, 260, note, 40, demo)
    graph.column(310, 300, stack, 60, prompt, negative, latent)
    graph.column(660, 320, effect, 80, conflicts)
    graph.column(1030, 270, whole)
    graph.column(1030, 270, kept, top=651)
    _row(graph, 1352, 60, with_all)
    _row(graph, 1352, 651, with_kept)
    graph.group("The demo model", "#3f789e", demo)
    graph.group("The LoRAs and the prompts", "#3f789e", stack, prompt, negative, latent)
    graph.group("What each block does, conflicts", "#b58b2a", effect, conflicts)
    graph.group("All blocks", "#8A8", whole, *with_all)
    graph.group("The blocks that matter", "#8A8", kept, *with_kept)
    return graph.document()


# --- a word alone -----------------------------------------------------------------------------------------------------

WORDS_NOTE = (
    "# Train a word without a LoRA",
    "Textual inversion on the demo model, without a GPU: the model stays as it is, and six vectors in place of the word"
    " *zorp* are trained. The images show a purple ring. The demo model knows neither purple nor rings: it knows"
    " circles, squares, triangles and crosses in red, yellow, green and blue.",
    "**Press Run.** It trains for a minute or two, from *blue circle*. **Before** is the prompt *a blue circle middle*,"
    " **After** is *a embedding:zorp middle*: purple, which lies between the colors that the model knows. A ring lies"
    " outside of what a word makes it draw: for that, train a LoRA beside the word (put *Adapter Settings*"
    " in front of *Train Words*, and switch *words only* off).",
    "*Save Words* writes `zorp.safetensors` into ComfyUI's embeddings folder, for prompts with `embedding:zorp`.",
    "**With your own**: write a new word into your captions (*a photo of sks_cat*), give it to *Train Words* with what"
    " it is most like (*cat*), and set the learning rate to 0.001.",
)


def words(classes: Mapping[str, Any]) -> dict[str, Any]:
    """A word of the demo's captions that is trained alone, and images before and after."""
    graph = Graph(classes, WORDS)
    note = graph.note(WORDS_NOTE)
    demo = graph.add("GraftDemo")
    dataset = graph.add("GraftDataset", folder="graft_demo/concept", resolution=256, validation=0.2)
    word = graph.add("GraftWords", words="zorp", initial="blue circle", count=6, learning_rate=0.1, alone=True)
    optimizer = graph.add("GraftOptimizer", learning_rate=0.001, schedule="cosine", batch_size=8, total_steps=160)
    start = graph.add("GraftTrainStart", run="word")
    step = graph.add("TrainStep", room=410, steps=160, validate_every=40)
    save = graph.add("GraftSaveWords")
    before = graph.add("CLIPTextEncode", "Prompt before", text="a blue circle middle")
    after = graph.add("CLIPTextEncode", "Prompt after", text="a embedding:zorp middle")
    negative = graph.add("CLIPTextEncode", "Negative: nothing", text="")
    latent = graph.add("EmptyLatentImage", width=256, height=256, batch_size=4)
    sampled_before = _sampled(graph, "Before", "words/before")
    sampled_after = _sampled(graph, "After", "words/after")
    for node in (dataset, start):
        graph.link(demo, 1, node, "clip")
        graph.link(demo, 2, node, "vae")
    graph.link(demo, 0, start, "model")
    graph.link(dataset, 0, start, "dataset")
    graph.chain(word, optimizer, start)
    graph.link(start, 0, step, "state")
    graph.link(step, 3, save, "lora_model")
    for text, source, output in ((before, demo, 1), (negative, demo, 1), (after, step, 2)):
        graph.link(source, output, text, "clip")
    _link_samplers(graph, ((sampled_before, (demo, 0)),), demo, before, negative, latent)
    _link_samplers(graph, ((sampled_after, (demo, 0)),), demo, after, negative, latent)
    graph.column(0, 270, note, 40, demo, latent)
    graph.column(320, 310, dataset, 90, before, negative)
    graph.column(690, 290, word, 0, optimizer)
    graph.fold(save)
    graph.column(1040, 290, start, step, 100, save, 30, after)
    _row(graph, 1380, 60, sampled_before)
    _row(graph, 1380, 651, sampled_after)
    graph.group("The demo model", "#3f789e", demo, latent)
    graph.group("Its images, and prompts", "#3f789e", dataset, before, negative)
    graph.group("The word", "#b58b2a", word, optimizer)
    graph.group("Train, and its embedding", "#b58b2a", start, step, save, after)
    graph.group("Before", "#8A8", *sampled_before)
    graph.group("After", "#8A8", *sampled_after)
    return graph.document()


# --- what you prefer --------------------------------------------------------------------------------------------------

PREFERENCE_NOTE = (
    "# Teach the demo model what you prefer",
    "Preference tuning (Diffusion-DPO) on the demo model, without a GPU. Asked for *a shape middle*, it draws a circle"
    " half of the time, and else a square, a triangle or a cross. It learns from 24 pairs of images that the circle is"
    " preferred. The pairs are put into `input/graft_demo` if they are not there: `shape-00.win.png` is better than"
    " `shape-00.lose.png`, and `shape-00.txt` is the caption of both.",
    "**Press Run.** It trains for a minute or two. **Before** and **After** are 32 images each, drawn from the same"
    " noise: count the circles, which are about half of them before and four fifths or more after. The report says how"
    " often held-out pairs are preferred as in the folder (implicit accuracy), which begins at 50%.",
    "**With your own**: make two images of each prompt. Name the better one `name.win.png` and the other one"
    " `name.lose.png`, and write the prompt into `name.txt`. Take a learning rate of 1e-5 to"
    " 1e-4, and *DPO beta* 2000 for SD 1.5 or 5000 for SDXL. Look at previews, and stop early: too much of it spoils"
    " images.",
)
PREFERENCE_STEPS = 60
PREFERENCE_SAMPLES = 32


def preference(classes: Mapping[str, Any]) -> dict[str, Any]:
    """A LoRA from pairs of images, with loss function dpo, and images before and after."""
    graph = Graph(classes, PREFERENCE)
    note = graph.note(PREFERENCE_NOTE)
    demo = graph.add("GraftDemo")
    dataset = graph.add("GraftDataset", folder="graft_demo/preference", resolution=256, validation=0.2)
    adapter = graph.add("GraftAdapter", rank=8, targets="all")
    optimizer = graph.add(
        "GraftOptimizer",
        learning_rate=0.0005,
        schedule="constant",
        batch_size=4,
        total_steps=PREFERENCE_STEPS,
    )
    objective = graph.add("GraftObjective", loss="dpo", conditioning_dropout=0.0)
    start = graph.add("GraftTrainStart", run="preference")
    step = graph.add("TrainStep", steps=PREFERENCE_STEPS, validate_every=20)
    report = graph.add("PreviewAny", "What was learned", 150)
    prompt = graph.add("CLIPTextEncode", "Prompt", text="a shape middle")
    negative = graph.add("CLIPTextEncode", "Negative: nothing", text="")
    latent = graph.add("EmptyLatentImage", width=256, height=256, batch_size=PREFERENCE_SAMPLES)
    before = _sampled(graph, "Before", "preference/before")
    after = _sampled(graph, "After", "preference/after")
    for node in (dataset, start):
        graph.link(demo, 1, node, "clip")
        graph.link(demo, 2, node, "vae")
    graph.link(demo, 0, start, "model")
    graph.link(dataset, 0, start, "dataset")
    graph.chain(adapter, optimizer, objective, start)
    graph.link(start, 0, step, "state")
    graph.link(step, 5, report, "source")
    for text in (prompt, negative):
        graph.link(demo, 1, text, "clip")
    _link_samplers(graph, ((before, (demo, 0)), (after, (step, 1))), demo, prompt, negative, latent)
    graph.column(0, 270, note, 40, demo)
    graph.column(320, 310, dataset, 90, prompt, negative)
    graph.column(690, 290, adapter, optimizer, objective)
    graph.column(690, 290, latent, top=1000)
    graph.column(1040, 290, start, 40, step)
    graph.column(1040, 290, report, top=985)
    _row(graph, 1380, 60, before)
    _row(graph, 1380, 651, after)
    graph.group("The demo model", "#3f789e", demo)
    graph.group("Its pairs, and what to draw", "#3f789e", dataset, prompt, negative)
    graph.group("Settings, and how many", "#b58b2a", adapter, optimizer, objective, latent)
    graph.group("Train", "#b58b2a", start, step, report)
    graph.group("Before", "#8A8", *before)
    graph.group("After", "#8A8", *after)
    return graph.document()


# --- images from the graph --------------------------------------------------------------------------------------------

SAMPLES_NOTE = (
    "# Train on images from the graph",
    "*Samples* makes a dataset of what a graph gives, without a folder. Here the demo model draws 16 red squares, and"
    " learns from them, without a GPU, that *a glim middle* is one of these.",
    "**Press Run.** It trains for a minute or two. The latents come straight from *KSampler*; *Prompt* is what all of"
    " them are trained with. **Before** and **After** are drawn from the same noise.",
    "**With your own**: whatever your model's own nodes put into a conditioning is trained as it is sampled. For Flux"
    " Kontext connect *ReferenceLatent*, for Wan image to video *WanImageToVideo*, for Flux Fill"
    " *InpaintModelConditioning*. *Load Image-Text Dataset from Folder* gives lists: every node behind it runs once for"
    " each entry, and *Samples* takes one latent and one conditioning of each.",
)
SAMPLES_STEPS = 80


def from_graph(classes: Mapping[str, Any]) -> dict[str, Any]:
    """A LoRA from latents that the model itself draws, with images before and after."""
    graph = Graph(classes, SAMPLES)
    note = graph.note(SAMPLES_NOTE)
    demo = graph.add("GraftDemo")
    drawn = graph.add("CLIPTextEncode", "What is drawn", text="a red square middle")
    negative = graph.add("CLIPTextEncode", "Negative: nothing", text="")
    latents = graph.add("EmptyLatentImage", width=256, height=256, batch_size=16)
    source = graph.add("KSampler", seed=1, steps=20, cfg=2.0, sampler_name="euler", scheduler="simple")
    prompt = graph.add("CLIPTextEncode", "Prompt", text="a glim middle")
    samples = graph.add("GraftSamples", validation=0.25)
    report = graph.add("PreviewAny", "What the dataset has", 150)
    adapter = graph.add("GraftAdapter", rank=8, targets="all")
    optimizer = graph.add(
        "GraftOptimizer",
        learning_rate=0.002,
        schedule="constant",
        batch_size=4,
        total_steps=SAMPLES_STEPS,
    )
    start = graph.add("GraftTrainStart", run="from_graph")
    step = graph.add("TrainStep", room=440, steps=SAMPLES_STEPS, validate_every=20)
    latent = graph.add("EmptyLatentImage", width=256, height=256, batch_size=4)
    before = _sampled(graph, "Before", "from_graph/before")
    after = _sampled(graph, "After", "from_graph/after")
    for text in (drawn, negative, prompt):
        graph.link(demo, 1, text, "clip")
    graph.link(demo, 0, source, "model")
    for made, name in ((drawn, "positive"), (negative, "negative"), (latents, "latent_image")):
        graph.link(made, 0, source, name)
    graph.link(source, 0, samples, "latents")
    graph.link(prompt, 0, samples, "conditioning")
    graph.link(demo, 1, samples, "clip")
    graph.link(samples, 1, report, "source")
    graph.link(demo, 0, start, "model")
    for number, name in ((1, "clip"), (2, "vae")):
        graph.link(demo, number, start, name)
    graph.link(samples, 0, start, "dataset")
    graph.chain(adapter, optimizer, start)
    graph.link(start, 0, step, "state")
    _link_samplers(graph, ((before, (demo, 0)), (after, (step, 1))), demo, prompt, negative, latent)
    graph.column(0, 270, note, 40, demo, latent)
    graph.column(320, 260, drawn, negative, latents, prompt, 30, adapter)
    graph.column(651, 290, source, samples)
    graph.column(651, 290, report, top=986)
    graph.column(990, 300, optimizer, 30, start, 30, step)
    _row(graph, 1350, 60, before)
    _row(graph, 1350, 651, after)
    graph.group("The demo model", "#3f789e", demo, latent)
    graph.group("What it draws", "#3f789e", drawn, negative, latents, prompt, adapter)
    graph.group("A dataset of it", "#3f789e", source, samples, report)
    graph.group("Train", "#b58b2a", optimizer, start, step)
    graph.group("Before", "#8A8", *before)
    graph.group("After", "#8A8", *after)
    return graph.document()


# --- several folders --------------------------------------------------------------------------------------------------

FOLDERS_NOTE = (
    "# Train on several folders",
    "Two folders in one training, each with settings of its own: *My subject* is the demo's new word, shown four times"
    " an epoch and held out for a quarter; *Other pictures* is what the model knows, shown once. It needs no GPU.",
    "**Press Run.** It trains for a minute or two. *What was read* says what an epoch has of each folder. **Before**"
    " and **After** are drawn from the same noise.",
    "**With your own**: give each *Dataset* its folder. Repeats, resolution, caption settings, tags to keep, caption"
    " prefix (in *filters*) and batch size are each folder's own. For a third folder connect another *Dataset* to"
    " *more images*. kohya's `dataset_config.toml`, given as *image folder*, does the same with one node.",
)
FOLDERS_STEPS = 80


def several_folders(classes: Mapping[str, Any]) -> dict[str, Any]:
    """A LoRA from two folders with repeats of their own, with images before and after."""
    graph = Graph(classes, FOLDERS_TITLE)
    note = graph.note(FOLDERS_NOTE)
    demo = graph.add("GraftDemo")
    prompt = graph.add("CLIPTextEncode", "Prompt", text="a zorp middle")
    negative = graph.add("CLIPTextEncode", "Negative: nothing", text="")
    latent = graph.add("EmptyLatentImage", width=256, height=256, batch_size=4)
    subject, others = (
        graph.add("GraftDataset", title, folder=f"graft_demo/{folder}", resolution=256, **own)
        for title, folder, own in (
            ("My subject", "concept", {"repeats": 4, "validation": 0.25}),
            ("Other pictures", "regular", {"repeats": 1, "validation": 0.1}),
        )
    )
    report = graph.add("PreviewAny", "What was read", 140)
    adapter = graph.add("GraftAdapter", rank=8, targets="all")
    optimizer = graph.add(
        "GraftOptimizer",
        learning_rate=0.002,
        schedule="constant",
        batch_size=4,
        total_steps=FOLDERS_STEPS,
    )
    start = graph.add("GraftTrainStart", run="several_folders")
    step = graph.add("TrainStep", room=440, steps=FOLDERS_STEPS, validate_every=20)
    before = _sampled(graph, "Before", "folders/before")
    after = _sampled(graph, "After", "folders/after")
    for text in (prompt, negative):
        graph.link(demo, 1, text, "clip")
    for node in (subject, others, start):
        graph.link(demo, 1, node, "clip")
        graph.link(demo, 2, node, "vae")
    graph.link(demo, 0, start, "model")
    for made, number, node, name in (
        (subject, 0, others, "more_images"),
        (others, 2, report, "source"),
        (others, 0, start, "dataset"),
        (adapter, 0, optimizer, "settings"),
        (optimizer, 0, start, "settings"),
        (start, 0, step, "state"),
    ):
        graph.link(made, number, node, name)
    _link_samplers(graph, ((before, (demo, 0)), (after, (step, 1))), demo, prompt, negative, latent)
    graph.column(0, 270, note, 40, demo, latent)
    graph.column(320, 300, subject, 90, prompt, negative)
    graph.column(680, 300, others, report, adapter)
    graph.column(1030, 300, optimizer, 30, start, 30, step)
    _row(graph, 1380, 60, before)
    _row(graph, 1380, 651, after)
    graph.group("The demo model", "#3f789e", demo, latent)
    graph.group("My subject", "#3f789e", subject, prompt, negative)
    graph.group("Other pictures, and settings", "#b58b2a", others, report, adapter)
    graph.group("Train", "#b58b2a", optimizer, start, step)
    graph.group("Before", "#8A8", *before)
    graph.group("After", "#8A8", *after)
    return graph.document()


# --- a stack, and ToDo ------------------------------------------------------------------------------------------------

STACK_NOTE = (
    "# A LoRA stack",
    "`LoRA Stack` lists files with strengths, `Patch Model with LoRA Stack` puts them all on the model in one "
    "pass over each weight and takes them off bit for bit.",
    "`merge` adds them to the weights, `bypass` at the activations; both pictures must look the same. The stack "
    "names the demo's LoRA twice, `graft_demo/zorp.safetensors`, which draws a zorp, a purple ring. It is put "
    "into the loras folder if it is not there.",
)


def stack(classes: Mapping[str, Any]) -> dict[str, Any]:
    """One stack of LoRAs on the model in two ways, and images of both."""
    graph = Graph(classes, STACK_TITLE)
    note = graph.note(STACK_NOTE, 300)
    demo = graph.add("GraftDemo")
    prompt = graph.add("CLIPTextEncode", "Prompt", text="a zorp left")
    negative = graph.add("CLIPTextEncode", "Negative: nothing", text="")
    latent = graph.add("EmptyLatentImage", width=256, height=256, batch_size=4)
    rows = [{"file": DEMO_LORA, "on": True, "model": strength, "clip": 1.0} for strength in (0.7, 0.3)]
    rows = graph.add("GraftLoRAStack", rows=json.dumps({"version": 1, "rows": rows}))
    graph.column(0, 300, note, 40, demo)
    graph.column(370, 320, rows, 60, prompt, negative, latent)
    for text in (prompt, negative):
        graph.link(demo, 1, text, "clip")
    graph.group("The demo model", "#3f789e", demo)
    graph.group("Stack and prompts", "#3f789e", rows, prompt, negative, latent)
    for top, way in ((60, "merge"), (651, "bypass")):
        patch = graph.add("LoRAStackPatch", f"Stack by {way}", mode=way)
        sampled = _sampled(graph, f"By {way}", f"stack/{way}")
        graph.link(demo, 0, patch, "model")
        graph.link(rows, 0, patch, "lora_stack")
        graph.link(demo, 1, patch, "clip")
        _link_samplers(graph, ((sampled, (patch, 0)),), demo, prompt, negative, latent)
        graph.column(760, 290, patch, top=top)
        _row(graph, 1110, top, sampled, 380)
        graph.group(f"By {way}", "#8A8", patch, *sampled)
    return graph.document()


TODO_NOTE = (
    "# Token downsampling",
    "`Apply ToDo` thins the keys and values of self-attention: factor 2 keeps a quarter of them. Compare the two "
    "pictures and the time each sampler takes (the larger the picture, the larger the difference; the demo model "
    "is tiny, so try it with SDXL at 1536 px).",
    "The report says how many tokens each level keeps.",
)


def todo(classes: Mapping[str, Any]) -> dict[str, Any]:
    """Images without and with token downsampling."""
    graph = Graph(classes, TODO_TITLE)
    note = graph.note(TODO_NOTE, 300)
    demo = graph.add("GraftDemo")
    prompt = graph.add("CLIPTextEncode", "Prompt", text="a red circle middle")
    negative = graph.add("CLIPTextEncode", "Negative: nothing", text="")
    latent = graph.add("EmptyLatentImage", width=256, height=256, batch_size=4)
    apply = graph.add("ApplyToDo")
    report = graph.add("PreviewAny", "Report")
    graph.column(0, 300, note, 40, demo)
    graph.column(370, 280, prompt, negative, latent)
    graph.column(720, 300, apply, report, top=651)
    for text in (prompt, negative):
        graph.link(demo, 1, text, "clip")
    graph.link(demo, 0, apply, "model")
    graph.link(latent, 0, apply, "latent")
    graph.link(apply, 1, report, "source")
    graph.group("The demo model", "#3f789e", demo)
    graph.group("Prompts", "#3f789e", prompt, negative, latent)
    for top, word, model, extra in ((60, "without", demo, ()), (651, "with", apply, (apply, report))):
        sampled = _sampled(graph, f"{word.title()} ToDo", f"todo/{word}")
        _link_samplers(graph, ((sampled, (model, 0)),), demo, prompt, negative, latent)
        _row(graph, 1090, top, sampled, 380)
        graph.group(f"{word.title()} ToDo", "#8A8", *extra, *sampled)
    return graph.document()


# --- a VAE ------------------------------------------------------------------------------------------------------------

DECODER_NOTE = (
    "# Repair a VAE's decoder",
    "*Demo VAE* has a damaged decoder: what it draws has noise and a color cast. Here the decoder is trained on the"
    " demo's images until that is gone. It needs no GPU, and there is nothing to download.",
    "**Press Run.** It trains for about a minute, and draws with the VAE before and after. *Train Step* shows the"
    " held-out error as it falls, and held-out images beside their reconstructions.",
    "The encoder keeps its bytes, so the latent space is the same: models that were made for this VAE still fit.",
    "**Your own VAE**: put *Load VAE* in place of *Demo VAE*, and the model's own CLIP and VAE into *Dataset*. Set the"
    " learning rate to 0.00002, and the steps in *Optimizer Settings* and *Train Step* to 2000 or more. Connect *VAE"
    " Save* to *Trained VAE*: *Load VAE* reads its file.",
)


def decoder(classes: Mapping[str, Any]) -> dict[str, Any]:
    """A damaged decoder that is trained on the demo's images, and an image through it before and after."""
    graph = Graph(classes, DECODER)
    note = graph.note(DECODER_NOTE, 280)
    demo = graph.add("GraftDemo")
    dataset = graph.add("GraftDataset", folder="graft_demo/regular", resolution=256, validation=0.1)
    damaged = graph.add("GraftDemoVAE", damage=1.0)
    optimizer = graph.add("GraftOptimizer", learning_rate=0.003, schedule="cosine", batch_size=4, total_steps=200)
    start = graph.add("GraftTrainVAEStart", crop=128, run="decoder")
    step = graph.add("TrainStep", steps=200, validate_every=50, preview_every=50)
    trained = graph.add("GraftTrainedVAE")
    prompt = graph.add("CLIPTextEncode", "Prompt", text="a red circle left")
    negative = graph.add("CLIPTextEncode", "Negative: nothing", text="")
    latent = graph.add("EmptyLatentImage", width=256, height=256, batch_size=4)
    sampler = graph.add(
        "KSampler",
        seed=0,
        steps=20,
        cfg=2.0,
        sampler_name="euler",
        scheduler="simple",
    )
    shown = []
    for title, prefix in (("Before", "decoder/before"), ("After", "decoder/after")):
        decode, image = graph.add("VAEDecode"), graph.add("SaveImage", title, 365, filename_prefix=prefix)
        graph.link(sampler, 0, decode, "samples")
        graph.link(decode, 0, image, "images")
        shown.append((decode, image))
    before, after = shown
    graph.link(demo, 1, dataset, "clip")
    graph.link(demo, 2, dataset, "vae")
    graph.link(damaged, 0, start, "vae")
    graph.link(dataset, 0, start, "dataset")
    graph.chain(optimizer, start)
    graph.link(start, 0, step, "state")
    graph.link(step, 0, trained, "state")
    for text in (prompt, negative):
        graph.link(demo, 1, text, "clip")
    graph.link(demo, 0, sampler, "model")
    for source, name in ((prompt, "positive"), (negative, "negative"), (latent, "latent_image")):
        graph.link(source, 0, sampler, name)
    graph.link(damaged, 0, before[0], "vae")
    graph.link(trained, 0, after[0], "vae")
    graph.column(0, 280, note, 40, demo, latent)
    graph.column(340, 310, dataset, 90, prompt, negative)
    graph.column(710, 300, damaged, 60, optimizer, 30, start)
    graph.fold(sampler)
    graph.column(1070, 320, step, 30, trained)
    graph.column(1070, 150, sampler, top=860)
    graph.column(1450, 380, *before)
    graph.column(1450, 380, *after, top=651)
    graph.group("The demo model", "#3f789e", demo, latent)
    graph.group("Its images, and what to draw", "#3f789e", dataset, prompt, negative)
    graph.group("The damaged VAE", "#b58b2a", damaged, optimizer, start)
    graph.group("Train, and draw latents", "#b58b2a", step, trained, sampler)
    graph.group("Before", "#8A8", *before)
    graph.group("After", "#8A8", *after)
    return graph.document()


# --- a slider ---------------------------------------------------------------------------------------------------------

SLIDER_NOTE = (
    "# Train a slider",
    "A LoRA whose strength moves a color, trained from three prompts, without images and without a GPU: from *a red"
    " circle middle* to *a green circle middle*, for the prompt *a yellow circle middle*.",
    "**Press Run.** It trains for a minute or two. Five rows of images are drawn from the same noise: **Before** at the"
    " top is the model alone, below it are strengths -3, -1.5, 1.5 and 3. The circles go from orange to green.",
    "**With your own model**: take its loaders in place of *Demo Model*. Write what the slider is for into *target"
    " prompt* (*a person*), its ends into *positive prompt* (*a very old person*) and *negative prompt* (*a very young"
    " person*), set width and height to what the model draws, denoising steps to 20, and guidance to 3. Train 300 to"
    " 1000 steps with learning rate 0.0002 and batch size 1, and save the result with *Save LoRA*.",
)
SLIDER_STRENGTHS = (-3.0, -1.5, 1.5, 3.0)
SLIDER_STEPS = 30
SLIDER_GUIDANCE, SLIDER_RATE = 0.4, 0.003
SLIDER_PROMPT = "a yellow circle middle"


def slider(classes: Mapping[str, Any]) -> dict[str, Any]:
    """A slider between two colors of the demo model, and images at several strengths."""
    graph = Graph(classes, SLIDER)
    note = graph.note(SLIDER_NOTE)
    demo = graph.add("GraftDemo")
    prompts = graph.add(
        "GraftSlider",
        positive="a green circle middle",
        negative="a red circle middle",
        target=SLIDER_PROMPT,
        guidance=SLIDER_GUIDANCE,
        width=256,
        height=256,
        steps=5,
        cfg=1.0,
    )
    adapter = graph.add("GraftAdapter", rank=8)
    optimizer = graph.add("GraftOptimizer", learning_rate=SLIDER_RATE, batch_size=4, total_steps=SLIDER_STEPS)
    start = graph.add("GraftTrainStart", run="slider")
    step = graph.add("TrainStep", steps=SLIDER_STEPS, validate_every=20)
    save = graph.add("GraftSaveLoRA", prefix="loras/slider")
    prompt = graph.add("CLIPTextEncode", "Prompt", text=SLIDER_PROMPT)
    negative = graph.add("CLIPTextEncode", "Negative: nothing", text="")
    latent = graph.add("EmptyLatentImage", width=256, height=256, batch_size=4)
    for node in (prompts, start):
        graph.link(demo, 1, node, "clip")
        graph.link(demo, 2, node, "vae")
    graph.link(demo, 0, start, "model")
    graph.link(prompts, 0, start, "dataset")
    graph.chain(adapter, optimizer, start)
    graph.link(start, 0, step, "state")
    graph.link(step, 0, save, "state")
    for text in (prompt, negative):
        graph.link(demo, 1, text, "clip")
    graph.column(0, 270, note, 40, demo, latent)
    graph.column(320, 290, prompts, 90, prompt, negative)
    graph.column(670, 290, adapter, optimizer, 30, start)
    graph.column(1020, 310, step, 60, save)
    rows = []
    for number, strength in enumerate((0.0, *SLIDER_STRENGTHS)):
        title = f"Strength {strength:g}" if strength else "Before"
        sampled = _sampled(graph, title, f"slider/{title.lower().replace(' ', '_')}", 160)
        model, patched = (demo, 0), []
        if strength:
            patch = graph.add("LoRAStackPatch", title, lora_strength=strength)
            graph.link(demo, 0, patch, "model")
            graph.link(step, 3, patch, "lora_model")
            model, patched = (patch, 0), [patch]
        _link_samplers(graph, ((sampled, model),), demo, prompt, negative, latent)
        *folded, image = [*patched, *sampled]
        graph.fold(*folded)
        for place, node in enumerate(folded, 3 - len(folded)):
            graph.column(1390, 150, node, top=60 + 225 * number + 50 * place)
        graph.column(1590, 370, image, top=60 + 225 * number)
        rows += [*folded, image]
    graph.group("The demo model", "#3f789e", demo, latent)
    graph.group("The direction", "#3f789e", prompts, prompt, negative)
    graph.group("Settings", "#b58b2a", adapter, optimizer, start)
    graph.group("Train", "#b58b2a", step, save)
    graph.group("From one end to the other", "#8A8", *rows)
    return graph.document()


# --- real models ------------------------------------------------------------------------------------------------------

NOTE = (
    "# Train a LoRA for {title}",
    "**Model files** (another one of the family works too: choose it in the loader)",
    "{files}",
    "**Your images**, with captions beside them (`photo.png`, `photo.txt`): drop their folder onto *Dataset*. Until"
    " then it trains on the demo's 16 images. Write what you train into *Prompt*, for the previews.",
    "**Training Recipe** chooses the settings for this model and your memory, and says why in its report. Set *steps*"
    " there and in *Train Step* to the same number.",
    "The LoRA is saved under `output/loras`. You can stop at any time: queued again, the run continues. For averaged"
    " weights, put *EMA Merge* in front of *Save LoRA*.",
)

TRAINING_ONLY = (
    "**The training adapter** is AI-Toolkit's, a LoRA that undoes the distillation while the loss is computed. It is"
    " off in previews, in MODEL and in the saved LoRA, so the model keeps its {steps} steps."
)
CONTROL_PICTURES = (
    "**Your pairs**: the image is what comes out of the edit, its caption the instruction (*make it winter*), and what"
    " goes in lies beside it: `photo.control.png`, or `control/photo.png`; up to three of them. Drop their folder onto"
    " *Dataset*. The demo's images have none. To try an edit, {edit}."
)
CLIPS = (
    "**Your clips**: `walk.mp4`, its caption `walk.txt`, and the picture that it starts with, `walk.control.png`."
    " *frames of clips* are trained together; pictures may lie between them. What CLIP vision sees of that picture,"
    " Wan 2.1 does not get from a folder; *Samples* trains with it. The demo's images have none. To try it, {edit}."
)
EDITS = {  # by the setting `control pictures`
    "Flux Kontext": "put *Load Image*, *FluxKontextImageScale*, *VAE Encode* and *ReferenceLatent* behind *Prompt*",
    "Qwen-Image-Edit Plus": "put *TextEncodeQwenImageEditPlus*, with *Load Image* and the VAE, in place of *Prompt*",
    "Wan image to video": "put *WanImageToVideo*, with *Load Image* and the VAE, behind the prompts",
}


def for_family(classes: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Loaders, dataset, recipe, training with previews, the saved LoRA, and an image of it."""
    name = "".join(letter for letter in family.title.lower() if letter not in " .()")
    graph = Graph(classes, f"Train a LoRA for {family.title}", lanes=LANES)
    texts = list(NOTE)
    if family.training_only:
        texts.insert(3, TRAINING_ONLY.format(steps=family.steps))
    if family.control_pictures:
        more = CLIPS if family.frame_rate else CONTROL_PICTURES
        texts[3] = more.format(edit=EDITS[family.control_pictures])
    loaders, note = _loaders(graph, family, texts)
    model = _outputs(loaders)
    prompt, negative, latent = _prompts(graph, family)
    dataset = graph.add(
        "GraftDataset",
        room=CONTROLLED if family.control_pictures else 0,
        folder="graft_demo/concept",
        resolution=family.resolution,
        repeats=1,
        control_pictures=family.control_pictures or "auto",
        frames=family.frames,
        frame_rate=family.frame_rate,
    )
    recipe = graph.add("GraftRecipe", steps=STEPS)
    start = graph.add("GraftTrainStart", run=name)
    step = graph.add("TrainStep", steps=STEPS, preview_every=PREVIEWS)
    save = graph.add("GraftSaveLoRA", prefix=f"loras/{name}")
    drawn = {"cfg": family.cfg, "sampler_name": "euler", "scheduler": family.scheduler}
    sampler = graph.add("KSampler", seed=7, steps=family.steps, **drawn)
    decode = graph.add("VAEDecode")
    image = graph.add("SaveImage", "With the LoRA", 480, filename_prefix=f"{name}/trained")
    for target, inputs in (
        (prompt, ("clip",)),
        (negative, ("clip",)),
        (dataset, ("vae", "clip")),
        (recipe, ("model",)),
        (start, ("model", "clip", "vae")),
        (decode, ("vae",)),
    ):
        for wanted in inputs:
            graph.link(*model[wanted], target, wanted)
    graph.link(dataset, 0, start, "dataset")
    graph.link(dataset, 0, recipe, "dataset")
    chosen, below = [recipe], []
    if family.training_only:
        rows = json.dumps({"version": 1, "rows": [{"file": family.training_only, "on": True, "model": 1.0}]})
        adapter = graph.add("GraftLoRAStack", "Training adapter", 310, rows=rows)
        only = graph.add("GraftTrainingOnlyLoRA")
        graph.link(adapter, 0, only, "lora_stack")
        chosen += [only]
        below = [adapter]
    graph.chain(*chosen, start)
    graph.link(start, 0, step, "state")
    for drawing, inputs in (
        (step, ("positive", "negative", "latent")),
        (sampler, ("positive", "negative", "latent_image")),
    ):
        for source, wanted in zip((prompt, negative, latent), inputs, strict=True):
            if family.guided_previews or (drawing, source) != (step, negative):
                graph.link(source, 0, drawing, wanted)
    graph.link(step, 0, save, "state")
    graph.link(step, 1, sampler, "model")
    graph.link(sampler, 0, decode, "samples")
    graph.link(decode, 0, image, "images")
    settings = (*chosen, start, *below)
    _five_columns(graph, note, loaders, (dataset, prompt, negative), settings, (step, save, latent))
    graph.column(1470, 230, sampler)
    graph.column(1750, 210, decode)
    graph.column(1470, 490, image, top=611)
    graph.group("Try it", "#8A8", sampler, decode, image)
    return graph.document()


def _five_columns(graph: Graph, note: Any, loaders: Any, data: Any, settings: Any, trained: Any) -> None:
    """Place what a published model's template has up to the trained LoRA."""
    graph.column(0, 388, note, graph.head - 50, *loaders, top=90 - graph.head)  # the note as high as the groups begin
    dataset, *prompts = data
    graph.column(432, 312, dataset, 60, *prompts)
    graph.column(794, 262, *settings)
    step, *others = trained
    graph.column(1108, 310, step, 100, *others)
    graph.group("The model", "#3f789e", *loaders)
    graph.group("Images and prompts", "#3f789e", *data)
    graph.group("Settings", "#b58b2a", *settings)
    graph.group("Train", "#b58b2a", *trained)


def _prompts(graph: Graph, family: Family) -> list[dict[str, Any]]:
    side = family.resolution // 16 * 16
    return [
        graph.add("CLIPTextEncode", "Prompt", text="a zorp middle"),
        graph.add("CLIPTextEncode", "Negative prompt", text=""),
        graph.add("EmptyLatentImage", width=side, height=side, batch_size=1),
    ]


PAIR = (
    "# Train a LoRA for {title}",
    "One run trains both models of Wan 2.2 in turn, each on its noise levels, with one of them on the device at a time."
    " Each gets a LoRA file, `…_high_noise` and `…_low_noise`.",
    "{files}",
    "**Your images**, with captions beside them (`photo.png`, `photo.txt`): drop their folder onto *Dataset*. Until"
    " then it trains on the demo's 16 images. Write what you train into *Prompt*, for the previews.",
    "**Training Recipe** says what it chose in its report. Each model is trained for the *steps* there and in *Train"
    " Step*. You can stop at any time: queued again, the run continues.",
)
SIDES = (("high noise", 1), ("low noise", 4))  # with the MODEL's output of Split Expert Pair
BOUNDARY_STEP = 10  # of 20: where ComfyUI's own template goes from one model to the other


def for_pair(classes: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Both experts of a pair in one run, with previews of both, a file for each, and an image of both."""
    name = family.title.lower().replace(" ", "")
    graph = Graph(classes, f"Train a LoRA for {family.title}", lanes=LANES)
    loaders, note = _loaders(graph, family, PAIR)
    high, low, *others = loaders
    model = _outputs([high, *others])
    high["title"], low["title"] = "High noise", "Low noise"
    prompt, negative, latent = _prompts(graph, family)
    dataset = graph.add("GraftDataset", folder="graft_demo/concept", resolution=family.resolution, repeats=1)
    recipe = graph.add("GraftRecipe", steps=STEPS)
    levels = {"timesteps": "uniform", "model_shift": False, "conditioning_dropout": 0.05}
    objective = graph.add("GraftObjective", room=330, expert="both", **levels)
    start = graph.add("GraftTrainPairStart", run=name)
    step = graph.add("TrainStep", steps=STEPS, preview_every=PREVIEWS)
    save = graph.add("GraftSaveLoRA", prefix=f"loras/{name}")
    for target, wanted in (
        (prompt, "clip"),
        (negative, "clip"),
        (dataset, "vae"),
        (dataset, "clip"),
        (recipe, "model"),
        (start, "clip"),
        (start, "vae"),
    ):
        graph.link(*model[wanted], target, wanted)
    for source, output, target, wanted in (
        (high, 0, start, "high_noise_model"),
        (low, 0, start, "low_noise_model"),
        (dataset, 0, recipe, "dataset"),
        (dataset, 0, start, "dataset"),
        (recipe, 0, objective, "settings"),
        (objective, 0, start, "settings"),
        (start, 0, step, "state"),
        (prompt, 0, step, "positive"),
        (negative, 0, step, "negative"),
        (latent, 0, step, "latent"),
        (step, 0, save, "state"),
    ):
        graph.link(source, output, target, wanted)
    settings = (recipe, objective, start)
    _five_columns(graph, note, loaders, (dataset, prompt, negative), settings, (step, save, latent))
    _pair_sampled(graph, family, step, (prompt, negative, latent), model["vae"], name)
    return graph.document()


def _pair_sampled(
    graph: Graph,
    family: Family,
    step: dict[str, Any],
    prompts: Sequence[dict[str, Any]],
    vae: tuple[dict[str, Any], int],
    name: str,
) -> None:
    """An image of both: the high-noise model's steps, then the low-noise model's, as in ComfyUI's own template."""
    prompt, negative, latent = prompts
    split = graph.add("GraftSplitExperts")
    graph.link(step, 0, split, "state")
    last = 10_000
    spans = ((0, BOUNDARY_STEP), (BOUNDARY_STEP, last))
    samplers = []
    for row, ((expert, output), (begin, end)) in enumerate(zip(SIDES, spans, strict=True)):
        is_first = row == 0
        sampler = graph.add(
            "KSamplerAdvanced",
            f"KSampler (Advanced): {expert}",
            add_noise="enable" if is_first else "disable",
            noise_seed=7,
            steps=family.steps,
            cfg=family.cfg,
            sampler_name="euler",
            scheduler=family.scheduler,
            start_at_step=begin,
            end_at_step=end,
            return_with_leftover_noise="enable" if is_first else "disable",
        )
        graph.link(split, output, sampler, "model")
        graph.link(prompt, 0, sampler, "positive")
        graph.link(negative, 0, sampler, "negative")
        samplers.append(sampler)
    decode = graph.add("VAEDecode")
    image = graph.add("SaveImage", "With both LoRAs", 480, filename_prefix=f"{name}/trained")
    graph.link(latent, 0, samplers[0], "latent_image")
    graph.link(samplers[0], 0, samplers[1], "latent_image")
    graph.link(samplers[1], 0, decode, "samples")
    graph.link(*vae, decode, "vae")
    graph.link(decode, 0, image, "images")
    graph.fold(*samplers)
    graph.column(1470, 230, split, *samplers)
    graph.column(1750, 210, decode)
    graph.column(1470, 490, image, top=samplers[1]["pos"][1] + 60)
    graph.group("The pair, tried", "#8A8", split, *samplers, decode, image)


def _loaders(graph: Graph, family: Family, texts: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The nodes that load the model's files, each with where to have a missing one, and the note that names all."""
    files = [(kind, values) for kind, values in family.files]
    if family.low_noise_model:
        files.insert(1, ("UNETLoader", {"unet_name": family.low_noise_model, "weight_dtype": "default"}))
    named = [[file for file in values.values() if file.endswith(".safetensors")] for _, values in files]
    listed = [*itertools.chain(*named), *([family.training_only] if family.training_only else [])]
    links = "\n".join(map(_file_line, listed))
    note = graph.note([text.format(title=family.title, files=links) for text in texts], 388)
    nodes = [graph.add(kind, **values) for kind, values in files]
    for node, mine in zip(nodes, named, strict=True):
        node["properties"]["models"] = [model_file(file) for file in mine]
    return nodes, note


def _outputs(loaders: list[dict[str, Any]]) -> dict[str, tuple[dict[str, Any], int]]:
    """(loader, output) of the model, the CLIP and the VAE: of one checkpoint, or of three files."""
    names = ("model", "clip", "vae")
    if len(loaders) == 1:
        return {name: (loaders[0], number) for number, name in enumerate(names)}
    return {name: (loader, 0) for name, loader in zip(names, loaders, strict=True)}


def _file_line(file: str) -> str:
    size = MODEL_FILES[file.removesuffix(".safetensors")][3]
    found = model_file(file)
    large = f", {size} GB" if size else ""
    return f"- `models/{found['directory']}/{file}` ([download]({found['url']}){large})"


def templates(classes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Every template of this file, by its title, which is its file's name."""
    made = {FIRST: first(classes), LORAS: loras(classes), WORDS: words(classes), PREFERENCE: preference(classes)}
    made[DECODER] = decoder(classes)
    made[SLIDER] = slider(classes)
    made[SAMPLES] = from_graph(classes)
    made[FOLDERS_TITLE] = several_folders(classes)
    made[STACK_TITLE] = stack(classes)
    made[TODO_TITLE] = todo(classes)
    for family in FAMILIES:
        write = for_family
        if family.low_noise_model:
            write = for_pair
        made[f"Train a LoRA for {family.title}"] = write(classes, family)
    return made


def main() -> None:
    """Write each template beside this file."""
    import asyncio

    from graft_nodes.headless import embedded

    embedded.install()
    import nodes

    loop = asyncio.new_event_loop()
    loop.run_until_complete(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
    loop.run_until_complete(nodes.load_custom_node(str(HERE.parent)))
    for title, document in templates(nodes.NODE_CLASS_MAPPINGS).items():
        path = HERE / f"{title}.json"
        path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
