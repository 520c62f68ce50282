"""Writes the templates that are made from one pattern: `python example_workflows/write_templates.py`, after a change of
the blueprint or of a node's inputs. The pictures beside them: `python -m graft_nodes.tests.editor.template_pictures`.

"Train your first LoRA" is the blueprint on the demo model, also as a form in the editor's app mode. "See what your
LoRAs do" measures and compares the rows of a stack on the demo model. "Train a word without a LoRA" trains an embedding
alone on it. "Teach the demo model what you prefer" trains on pairs of images, "Repair a VAE's decoder" a small VAE,
"Train a slider" a color that follows the strength. "Train on images from the graph" needs no folder: the model draws
what a new word is trained on. "Train on several folders" has two with settings of their own. "Train a LoRA for …" loads
a published model of one family, with Training Recipe, previews and Save LoRA; a distilled one with its training
adapter, and Wan 2.2 with both of its models.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BLUEPRINT = HERE.parent / "subgraphs" / "Train a LoRA (Graft).json"
OPTIONAL = 7  # the shape of an optional input's socket
FIRST = "Train your first LoRA"
LORAS = "See what your LoRAs do"
WORDS = "Train a word without a LoRA"
SLIDER = "Train a slider"
PREFERENCE = "Teach the demo model what you prefer"
DECODER = "Repair a VAE's decoder"
SAMPLES = "Train on images from the graph"
FOLDERS_TITLE = "Train on several folders"
DEMO_LORA = "graft_demo/zorp.safetensors"
SECOND_LORA = "graft_demo/mauve.safetensors"
LEFT, WIDE = -160, 500  # the column of a published model's loaders: names of files beside their labels


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
# The inputs that name files, and the folder of models/ that each is looked for in.
FOLDERS = {
    "ckpt_name": "checkpoints",
    "unet_name": "diffusion_models",
    "clip_name": "text_encoders",
    "clip_name1": "text_encoders",
    "clip_name2": "text_encoders",
    "vae_name": "vae",
}
STEPS, PREVIEWS = 1500, 250


class Graph:
    """An editor workflow that is being written: nodes by their host's schemas, and the links between them."""

    def __init__(self, classes: Mapping[str, Any], title: str, first_id: int = 1) -> None:
        from graft_nodes.headless.embedded import catalogue

        self.classes, self.look_up, self.title = classes, catalogue(classes, {}), title
        self.first_id = first_id
        self.nodes: list[dict[str, Any]] = []
        self.links: list[list[Any]] = []
        self.groups: list[dict[str, Any]] = []

    def note(self, text: str, place: tuple[int, int], size: tuple[int, int]) -> None:
        """A text on the canvas."""
        node = self._place("MarkdownNote", place, size)
        node.update(inputs=[], outputs=[], properties={}, widgets_values=[text], color="#432", bgcolor="#653")

    def add(
        self, kind: str, place: tuple[int, int], size: tuple[int, int], title: str = "", **values: Any
    ) -> dict[str, Any]:
        """A node with its widgets' defaults, but for `values`."""
        from graft_nodes.headless.embedded import EditorNode

        schema = self.look_up(kind)
        shown = EditorNode(schema)
        node = self._place(kind, place, size)
        node["inputs"] = [_slot(item) for item in shown.sockets]
        node["outputs"] = [
            {"name": name, "type": kind_, "links": []}
            for name, kind_ in zip(self.output_names(kind), schema.outputs, strict=True)
        ]
        node["properties"] = {"Node name for S&R": kind}
        node["widgets_values"] = [_value(widget, values) for widget in shown.widgets]
        if title:
            node["title"] = title
        return node

    def output_names(self, kind: str) -> Sequence[str]:
        """The names of a node's outputs."""
        found = self.classes[kind]
        return getattr(found, "RETURN_NAMES", None) or found.RETURN_TYPES

    def link(self, source: dict[str, Any], output: int, target: dict[str, Any], name: str) -> None:
        """Connect an output, by place, to an input, by name."""
        (number,) = (place for place, slot in enumerate(target["inputs"]) if slot["name"] == name)
        link = len(self.links) + 1
        self.links.append([link, source["id"], output, target["id"], number, source["outputs"][output]["type"]])
        source["outputs"][output]["links"].append(link)
        target["inputs"][number]["link"] = link

    def chain(self, *nodes: dict[str, Any]) -> None:
        """Connect the settings of each node to the next one."""
        for source, target in itertools.pairwise(nodes):
            self.link(source, 0, target, "settings")

    def group(self, title: str, color: str, *nodes: dict[str, Any]) -> None:
        """A frame around nodes."""
        left, top = (min(node["pos"][axis] for node in nodes) for axis in (0, 1))
        right, bottom = (max(node["pos"][axis] + node["size"][axis] for node in nodes) for axis in (0, 1))
        bounding = [left - 20, top - 80, right - left + 40, bottom - top + 100]
        self.groups.append(
            {
                "id": len(self.groups) + 1,
                "title": title,
                "bounding": bounding,
                "color": color,
                "font_size": 24,
                "flags": {},
            }
        )

    def document(self, **extra: Any) -> dict[str, Any]:
        """The workflow as the editor saves it."""
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"graft/{self.title}")),
            "revision": 0,
            "last_node_id": self.first_id + len(self.nodes) - 1,
            "last_link_id": len(self.links),
            "nodes": self.nodes,
            "links": self.links,
            "groups": self.groups,
            "config": {},
            "extra": {"ds": {"scale": 0.7, "offset": [560, 120]}, **extra},
            "version": 0.4,
        }

    def _place(self, kind: str, place: tuple[int, int], size: tuple[int, int]) -> dict[str, Any]:
        return self.put({"type": kind}, place, size)

    def put(self, node: dict[str, Any], place: tuple[int, int], size: tuple[int, int]) -> dict[str, Any]:
        """A node as it is, with an id and a place of its own."""
        order = len(self.nodes)
        node = {**node, "id": self.first_id + order, "pos": list(place), "size": list(size), "order": order}
        self.nodes.append({**node, "flags": {}, "mode": 0})
        return self.nodes[-1]


def _slot(item: Any) -> dict[str, Any]:
    slot: dict[str, Any] = {"name": item.name, "type": item.type}
    if item.widget:
        slot["widget"] = {"name": item.name}
    elif not item.required:
        slot["shape"] = OPTIONAL
    return {**slot, "link": None}


def _value(widget: Any, values: dict[str, Any]) -> Any:
    if widget.input is None:
        return "fixed"  # of a seed: the same one at every run
    return values.get(widget.name, widget.default)


# --- the first one ----------------------------------------------------------------------------------------------------

FIRST_NOTE = (
    "# Train your first LoRA",
    "Teaches the demo model a word that it does not know, *zorp*, from 16 images. It needs no GPU, and there is nothing"
    " to download: the demo's images are put into `input/graft_demo` if they are not there.",
    "**Press Run.** It trains for a minute or two, saves the LoRA in `output/loras`, and draws *a zorp middle* before"
    " and after.",
    "**Enter subgraph** on *Train a LoRA* shows the curve and the previews as they come, and stops the run. Run"
    " continues it.",
    "Then change one of the nine settings and run again. Or drop a folder of your own images with captions onto"
    " *Dataset* in the subgraph, and choose it as *folder*.",
    "In app mode (the button beside *Graph*, at the top left) this is a form without the graph. It shows the curve"
    " while it trains, then the previews, the saved LoRA with a button that downloads it, and the images.",
)
FIRST_PREVIEWS = 50  # steps between two previews
FIRST_SETTINGS = {
    "folder": "graft_demo/concept",
    "resolution": 256,
    "rank": 16,
    "learning_rate": 0.002,
    "batch_size": 8,
    "steps": 250,
    "run": "first",
    "prefix": "loras/first",
}


def first(classes: Mapping[str, Any]) -> dict[str, Any]:
    """The blueprint with its nine settings on the demo model, images before and after, the curve and the saved file."""
    blueprint = json.loads(BLUEPRINT.read_text(encoding="utf-8"))
    graph = Graph(classes, FIRST, first_id=21)  # not an id inside the blueprint
    graph.note("\n\n".join(FIRST_NOTE), (-520, 60), (460, 420))
    demo = graph.add("GraftDemo", (0, 60), (300, 130))
    prompt = graph.add("CLIPTextEncode", (0, 220), (300, 110), "Prompt", text="a zorp middle")
    negative = graph.add("CLIPTextEncode", (0, 390), (300, 110), "Negative: nothing", text="")
    latent = graph.add("EmptyLatentImage", (0, 560), (300, 130), width=256, height=256, batch_size=4)
    before = _sampled(graph, (760, 60), "Before", "first/before")
    train = _blueprint_node(graph, blueprint, (380, 60), (320, 420))
    after = _sampled(graph, (760, 640), "After", "first/after")
    curve = graph.add("SaveImage", (1560, 640), (400, 320), "Loss", filename_prefix="first/loss")
    file = graph.add("PreviewAny", (1560, 1020), (400, 160), "Saved file")
    for name, output in (("model", 0), ("clip", 1), ("vae", 2)):
        graph.link(demo, output, train, name)
    for source, name in ((prompt, "positive"), (negative, "negative"), (latent, "latent")):
        graph.link(source, 0, train, name)
    for text in (prompt, negative):
        graph.link(demo, 1, text, "clip")
    _link_samplers(graph, ((before, (demo, 0)), (after, (train, 0))), demo, prompt, negative, latent)
    graph.link(train, 2, curve, "images")
    graph.link(train, 3, file, "source")
    graph.group("The demo model and prompts", "#3f789e", demo, prompt, negative, latent)
    graph.group("Train: nine settings", "#b58b2a", train)
    graph.group("Before", "#8A8", *before)
    graph.group("After", "#8A8", *after)
    graph.group("The curve and the saved file", "#8A8", curve, file)
    shown = [slot["name"] for slot in train["inputs"] if "widget" in slot]
    form = {
        "inputs": [[train["id"], name] for name in shown],
        "outputs": [after[2]["id"], curve["id"], *_inside(blueprint, train["id"], "GraftSaveLoRA", "TrainStep")],
    }
    return {**graph.document(linearData=form), "definitions": _with_previews(blueprint["definitions"])}


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


def _blueprint_node(
    graph: Graph, blueprint: dict[str, Any], place: tuple[int, int], size: tuple[int, int]
) -> dict[str, Any]:
    """The blueprint as one node, with FIRST_SETTINGS in its widgets."""
    (node,) = json.loads(json.dumps(blueprint["nodes"]))
    shown = [slot["name"] for slot in node["inputs"] if "widget" in slot]
    saved = dict(zip(shown, node["widgets_values"], strict=True)) | FIRST_SETTINGS
    node["widgets_values"] = [saved[name] for name in shown]
    node["widgets_values_named"] = saved
    return graph.put(node, place, size)


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


def _sampled(graph: Graph, place: tuple[int, int], title: str, prefix: str) -> tuple[dict[str, Any], ...]:
    """KSampler, VAE Decode and Save Image, linked; what the sampler needs is not."""
    left, top = place
    settings = {"seed": 7, "steps": 20, "cfg": 2.0, "sampler_name": "euler", "scheduler": "simple"}
    sampler = graph.add("KSampler", (left, top), (300, 280), **settings)
    decode = graph.add("VAEDecode", (left, top + 340), (220, 60))
    save = graph.add("SaveImage", (left + 340, top), (400, 440), title, filename_prefix=prefix)
    graph.link(sampler, 0, decode, "samples")
    graph.link(decode, 0, save, "images")
    return sampler, decode, save


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
    graph.note("\n\n".join(LORAS_NOTE), (-560, 60), (500, 520))
    demo = graph.add("GraftDemo", (0, 60), (300, 130))
    prompt = graph.add("CLIPTextEncode", (0, 250), (300, 110), "Prompt", text="a zorp left")
    negative = graph.add("CLIPTextEncode", (0, 420), (300, 110), "Negative: nothing", text="")
    latent = graph.add("EmptyLatentImage", (0, 590), (300, 130), width=256, height=256, batch_size=1)
    strengths = {DEMO_LORA: 0.7, SECOND_LORA: 0.6}
    listed = [{"file": file, "on": True, "model": given, "clip": given} for file, given in strengths.items()]
    rows = json.dumps({"version": 1, "rows": listed})
    stack = graph.add("GraftLoRAStack", (380, 60), (460, 240), rows=rows)
    effect = graph.add("GraftLoRAEffect", (900, 60), (460, 620))
    conflicts = graph.add("GraftLoRAConflicts", (380, 420), (460, 560))
    whole = graph.add("GraftLoadLoRAs", (900, 800), (460, 240), rows=rows)
    kept = graph.add("LoRAStackPatch", (900, 1100), (460, 240))
    with_all = _sampled(graph, (1420, 60), "All blocks", "loras/all")
    with_kept = _sampled(graph, (1420, 640), "The blocks that matter", "loras/kept")
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
    graph.group("The demo model and prompts", "#3f789e", demo, prompt, negative, latent)
    graph.group("The LoRAs, and where they conflict", "#b58b2a", stack, conflicts)
    graph.group("What each block does", "#b58b2a", effect)
    graph.group("On the model", "#88A", whole, kept)
    graph.group("All blocks", "#8A8", *with_all)
    graph.group("The blocks that matter", "#8A8", *with_kept)
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
    graph.note("\n\n".join(WORDS_NOTE), (-560, 60), (500, 620))
    demo = graph.add("GraftDemo", (0, 60), (300, 130))
    dataset = graph.add(
        "GraftDataset", (0, 270), (400, 560), folder="graft_demo/concept", resolution=256, validation=0.2
    )
    word = graph.add(
        "GraftWords", (460, 60), (360, 260), words="zorp", initial="blue circle", count=6, learning_rate=0.1, alone=True
    )
    optimizer = graph.add(
        "GraftOptimizer", (460, 400), (360, 250), learning_rate=0.001, schedule="cosine", batch_size=8, total_steps=160
    )
    start = graph.add("GraftTrainStart", (880, 60), (360, 368), run="word")
    step = graph.add("TrainStep", (880, 470), (400, 560), steps=160, validate_every=40)
    save = graph.add("GraftSaveWords", (1340, 60), (300, 60))
    before = graph.add("CLIPTextEncode", (1340, 200), (300, 110), "Prompt before", text="a blue circle middle")
    after = graph.add("CLIPTextEncode", (1340, 380), (300, 110), "Prompt after", text="a embedding:zorp middle")
    negative = graph.add("CLIPTextEncode", (1340, 560), (300, 110), "Negative: nothing", text="")
    latent = graph.add("EmptyLatentImage", (1340, 740), (300, 130), width=256, height=256, batch_size=4)
    sampled_before = _sampled(graph, (1720, 60), "Before", "words/before")
    sampled_after = _sampled(graph, (1720, 640), "After", "words/after")
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
    graph.group("The demo model and its images", "#3f789e", demo, dataset)
    graph.group("The word", "#b58b2a", word, optimizer)
    graph.group("Train", "#b58b2a", start, step)
    graph.group("Prompts and the embedding", "#88A", save, before, after, negative, latent)
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
    graph.note("\n\n".join(PREFERENCE_NOTE), (-560, 60), (500, 660))
    demo = graph.add("GraftDemo", (0, 60), (300, 130))
    dataset = graph.add(
        "GraftDataset", (0, 270), (400, 560), folder="graft_demo/preference", resolution=256, validation=0.2
    )
    adapter = graph.add("GraftAdapter", (460, 60), (360, 260), rank=8, targets="all")
    optimizer = graph.add(
        "GraftOptimizer",
        (460, 400),
        (360, 220),
        learning_rate=0.0005,
        schedule="constant",
        batch_size=4,
        total_steps=PREFERENCE_STEPS,
    )
    objective = graph.add("GraftObjective", (460, 700), (360, 260), loss="dpo", conditioning_dropout=0.0)
    start = graph.add("GraftTrainStart", (880, 60), (360, 368), run="preference")
    step = graph.add("TrainStep", (880, 470), (400, 560), steps=PREFERENCE_STEPS, validate_every=20)
    report = graph.add("PreviewAny", (880, 1110), (400, 260), "What was learned")
    prompt = graph.add("CLIPTextEncode", (1340, 60), (300, 110), "Prompt", text="a shape middle")
    negative = graph.add("CLIPTextEncode", (1340, 240), (300, 110), "Negative: nothing", text="")
    latent = graph.add(
        "EmptyLatentImage", (1340, 420), (300, 130), width=256, height=256, batch_size=PREFERENCE_SAMPLES
    )
    before = _sampled(graph, (1720, 60), "Before", "preference/before")
    after = _sampled(graph, (1720, 640), "After", "preference/after")
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
    graph.group("The demo model and its pairs", "#3f789e", demo, dataset)
    graph.group("Settings", "#b58b2a", adapter, optimizer, objective)
    graph.group("Train", "#b58b2a", start, step, report)
    graph.group("What to draw", "#88A", prompt, negative, latent)
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
    graph.note("\n\n".join(SAMPLES_NOTE), (-560, 60), (500, 620))
    demo = graph.add("GraftDemo", (0, 60), (300, 130))
    drawn = graph.add("CLIPTextEncode", (0, 270), (300, 110), "What is drawn", text="a red square middle")
    negative = graph.add("CLIPTextEncode", (0, 460), (300, 110), "Negative: nothing", text="")
    latents = graph.add("EmptyLatentImage", (0, 640), (300, 130), width=256, height=256, batch_size=16)
    source = graph.add(
        "KSampler", (360, 60), (300, 280), seed=1, steps=20, cfg=2.0, sampler_name="euler", scheduler="simple"
    )
    prompt = graph.add("CLIPTextEncode", (360, 420), (300, 110), "Prompt", text="a glim middle")
    samples = graph.add("GraftSamples", (360, 610), (300, 320), validation=0.25)
    report = graph.add("PreviewAny", (360, 1010), (300, 200), "What the dataset has")
    adapter = graph.add("GraftAdapter", (720, 60), (360, 260), rank=8, targets="all")
    optimizer = graph.add(
        "GraftOptimizer",
        (720, 400),
        (360, 220),
        learning_rate=0.002,
        schedule="constant",
        batch_size=4,
        total_steps=SAMPLES_STEPS,
    )
    start = graph.add("GraftTrainStart", (720, 700), (360, 360), run="from_graph")
    step = graph.add("TrainStep", (1140, 60), (400, 560), steps=SAMPLES_STEPS, validate_every=20)
    latent = graph.add("EmptyLatentImage", (1140, 700), (300, 130), width=256, height=256, batch_size=4)
    before = _sampled(graph, (1600, 60), "Before", "from_graph/before")
    after = _sampled(graph, (1600, 640), "After", "from_graph/after")
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
    graph.group("What the demo model draws", "#3f789e", demo, drawn, negative, latents)
    graph.group("A dataset of it", "#3f789e", source, prompt, samples, report)
    graph.group("Settings", "#b58b2a", adapter, optimizer, start)
    graph.group("Train", "#b58b2a", step, latent)
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
    graph.note("\n\n".join(FOLDERS_NOTE), (-560, 60), (500, 560))
    demo = graph.add("GraftDemo", (0, 60), (300, 130))
    prompt = graph.add("CLIPTextEncode", (0, 270), (300, 110), "Prompt", text="a zorp middle")
    negative = graph.add("CLIPTextEncode", (0, 460), (300, 110), "Negative: nothing", text="")
    latent = graph.add("EmptyLatentImage", (0, 640), (300, 130), width=256, height=256, batch_size=4)
    subject, others = (
        graph.add("GraftDataset", place, (340, 740), title, folder=f"graft_demo/{folder}", resolution=256, **own)
        for place, title, folder, own in (
            ((360, 60), "My subject", "concept", {"repeats": 4, "validation": 0.25}),
            ((760, 60), "Other pictures", "regular", {"repeats": 1, "validation": 0.1}),
        )
    )
    report = graph.add("PreviewAny", (760, 860), (340, 260), "What was read")
    adapter = graph.add("GraftAdapter", (1160, 60), (360, 260), rank=8, targets="all")
    optimizer = graph.add(
        "GraftOptimizer",
        (1160, 400),
        (360, 220),
        learning_rate=0.002,
        schedule="constant",
        batch_size=4,
        total_steps=FOLDERS_STEPS,
    )
    start = graph.add("GraftTrainStart", (1160, 700), (360, 360), run="several_folders")
    step = graph.add("TrainStep", (1580, 60), (400, 560), steps=FOLDERS_STEPS, validate_every=20)
    before = _sampled(graph, (2040, 60), "Before", "several_folders/before")
    after = _sampled(graph, (2040, 640), "After", "several_folders/after")
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
    graph.group("The demo model and prompts", "#3f789e", demo, prompt, negative, latent)
    graph.group("Two folders", "#3f789e", subject, others, report)
    graph.group("Settings", "#b58b2a", adapter, optimizer, start)
    graph.group("Train", "#b58b2a", step)
    graph.group("Before", "#8A8", *before)
    graph.group("After", "#8A8", *after)
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
    graph.note("\n\n".join(DECODER_NOTE), (-560, 60), (500, 560))
    demo = graph.add("GraftDemo", (0, 60), (300, 130))
    dataset = graph.add(
        "GraftDataset", (0, 270), (400, 560), folder="graft_demo/regular", resolution=256, validation=0.1
    )
    damaged = graph.add("GraftDemoVAE", (460, 60), (360, 90), damage=1.0)
    optimizer = graph.add(
        "GraftOptimizer", (460, 230), (360, 250), learning_rate=0.003, schedule="cosine", batch_size=4, total_steps=200
    )
    start = graph.add("GraftTrainVAEStart", (880, 60), (360, 340), crop=128, run="decoder")
    step = graph.add("TrainStep", (880, 480), (400, 700), steps=200, validate_every=50, preview_every=50)
    trained = graph.add("GraftTrainedVAE", (1340, 60), (300, 100))
    prompt = graph.add("CLIPTextEncode", (1340, 240), (300, 110), "Prompt", text="a red circle left")
    negative = graph.add("CLIPTextEncode", (1340, 430), (300, 110), "Negative: nothing", text="")
    latent = graph.add("EmptyLatentImage", (1340, 620), (300, 130), width=256, height=256, batch_size=4)
    sampler = graph.add(
        "KSampler",
        (1720, 60),
        (300, 270),
        seed=0,
        steps=20,
        cfg=2.0,
        sampler_name="euler",
        scheduler="simple",
    )
    shown = []
    for top, title, prefix in ((60, "Before", "decoder/before"), (640, "After", "decoder/after")):
        decode = graph.add("VAEDecode", (2080, top), (220, 60))
        image = graph.add("SaveImage", (2340, top), (400, 440), title, filename_prefix=prefix)
        graph.link(sampler, 0, decode, "samples")
        graph.link(decode, 0, image, "images")
        shown.append((decode, image))
    (before, before_image), (after, after_image) = shown
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
    graph.link(damaged, 0, before, "vae")
    graph.link(trained, 0, after, "vae")
    graph.group("The demo model and its images", "#3f789e", demo, dataset)
    graph.group("The damaged VAE", "#b58b2a", damaged, optimizer)
    graph.group("Train", "#b58b2a", start, step)
    graph.group("Trained VAE, and what to draw", "#88A", trained, prompt, negative, latent)
    graph.group("Latents of the demo model", "#88A", sampler)
    graph.group("Before", "#8A8", before, before_image)
    graph.group("After", "#8A8", after, after_image)
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
    graph.note("\n\n".join(SLIDER_NOTE), (-560, 60), (500, 560))
    demo = graph.add("GraftDemo", (0, 60), (300, 130))
    prompts = graph.add(
        "GraftSlider",
        (0, 270),
        (400, 740),
        positive="a green circle middle",
        negative="a red circle middle",
        target=SLIDER_PROMPT,
        guidance=SLIDER_GUIDANCE,
        width=256,
        height=256,
        steps=5,
        cfg=1.0,
    )
    adapter = graph.add("GraftAdapter", (460, 60), (360, 260), rank=8)
    optimizer = graph.add(
        "GraftOptimizer", (460, 400), (360, 250), learning_rate=SLIDER_RATE, batch_size=4, total_steps=SLIDER_STEPS
    )
    start = graph.add("GraftTrainStart", (880, 60), (360, 368), run="slider")
    step = graph.add("TrainStep", (880, 470), (400, 560), steps=SLIDER_STEPS, validate_every=20)
    save = graph.add("GraftSaveLoRA", (880, 1110), (400, 160), prefix="loras/slider")
    prompt = graph.add("CLIPTextEncode", (1340, 60), (300, 110), "Prompt", text=SLIDER_PROMPT)
    negative = graph.add("CLIPTextEncode", (1340, 240), (300, 110), "Negative: nothing", text="")
    latent = graph.add("EmptyLatentImage", (1340, 420), (300, 130), width=256, height=256, batch_size=4)
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
    graph.group("The demo model and the direction", "#3f789e", demo, prompts)
    graph.group("Settings", "#b58b2a", adapter, optimizer)
    graph.group("Train", "#b58b2a", start, step, save)
    graph.group("What to draw", "#88A", prompt, negative, latent)
    before = _sampled(graph, (1720, 60), "Before", "slider/before")
    _link_samplers(graph, ((before, (demo, 0)),), demo, prompt, negative, latent)
    graph.group("Before", "#8A8", *before)
    for number, strength in enumerate(SLIDER_STRENGTHS):
        top = 660 + 580 * number
        patch = graph.add("LoRAStackPatch", (1340, top), (300, 180), f"Strength {strength:g}", lora_strength=strength)
        graph.link(demo, 0, patch, "model")
        graph.link(step, 3, patch, "lora_model")
        sampled = _sampled(graph, (1720, top), f"Strength {strength:g}", f"slider/strength_{strength:g}")
        _link_samplers(graph, ((sampled, (patch, 0)),), demo, prompt, negative, latent)
        graph.group(f"Strength {strength:g}", "#8A8", patch, *sampled)
    return graph.document()


# --- real models ------------------------------------------------------------------------------------------------------

NOTE = (
    "# Train a LoRA for {title}",
    "Loads the model, chooses the settings for it and for your memory, trains with previews, and saves the LoRA.",
    "**Files that it expects**",
    "{files}",
    "Another file of the same family works too: choose it in the loader. If one is missing, ComfyUI says its name and"
    " runs nothing.",
    "**Your images**, with captions beside them (`photo.png`, `photo.txt`): drop their folder onto *Dataset*, or choose"
    " one in ComfyUI's `input` folder from its list. Until then it trains on the demo's 16 images. Write what you train"
    " into *Prompt*, for the previews.",
    "**Training Recipe** chooses the settings for this model and your memory, and says why. Set *steps* there and in"
    " *Train Step* to the same number.",
    "The LoRA is saved under `output/loras`. You can stop at any time: queued again, the run continues.",
)

TRAINING_ONLY = (
    "**The training adapter** is AI-Toolkit's, from `huggingface.co/ostris/{repository}`: a LoRA that undoes the"
    " distillation. It is on while the loss is computed, and off in previews, in MODEL and in the saved LoRA. So the"
    " model keeps its {steps} steps. Without it the few steps are lost while it trains."
)

CONTROL_PICTURES = (
    "**Your pairs**: the image is what comes out of the edit, its caption the instruction (*make it winter*). What goes"
    " in lies beside it: `photo.control.png`, or `control/photo.png`; up to three of them. The demo's images have none,"
    " so with them it learns to draw from text alone. The previews and the image at the end are drawn without one too;"
    " to try an edit, {edit}."
)
CLIPS = (
    "**Your clips**: `walk.mp4`, its caption `walk.txt`, and beside it the picture that it starts with,"
    " `walk.control.png`. *frames of clips* are how many frames are trained together; pictures with a control picture"
    " of their own may lie between them. The demo's images have none, so with them it learns to draw from text alone."
    " What CLIP vision sees of that picture, Wan 2.1 does not get from a folder; *Samples* trains with it."
    " The previews and the image at the end are drawn without one too; to try it, {edit}."
)
EDITS = {  # by the setting `control pictures`
    "Flux Kontext": "put *Load Image*, *FluxKontextImageScale*, *VAE Encode* and *ReferenceLatent* behind *Prompt*",
    "Qwen-Image-Edit Plus": "put *TextEncodeQwenImageEditPlus*, with *Load Image* and the VAE, in place of *Prompt*",
    "Wan image to video": "put *WanImageToVideo*, with *Load Image* and the VAE, behind the prompts",
}


def for_family(classes: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Loaders, dataset, recipe, training with previews, the average saved as a LoRA, and an image of it."""
    title = f"Train a LoRA for {family.title}"
    name = "".join(letter for letter in family.title.lower() if letter not in " .()")
    graph = Graph(classes, title)
    note = list(NOTE)
    height = 620
    if family.training_only:
        repository = family.training_only.rpartition("_")[0]
        note.insert(5, TRAINING_ONLY.format(repository=repository, steps=family.steps))
        height = 780
    if family.control_pictures:
        pairs = CLIPS if family.frame_rate else CONTROL_PICTURES
        note.insert(6, pairs.format(edit=EDITS[family.control_pictures]))
        height = 860
    text = "\n\n".join(note).format(title=family.title, files=_file_lines(family))
    graph.note(text, (LEFT - 560, 60), (500, height))
    loaders = _loaders(graph, family)
    outputs = _outputs(loaders)
    prompt = graph.add("CLIPTextEncode", (LEFT, 580), (WIDE, 130), "Prompt", text="a zorp middle")
    negative = graph.add("CLIPTextEncode", (LEFT, 770), (WIDE, 110), "Negative prompt", text="")
    side = family.resolution // 16 * 16
    latent = graph.add("EmptyLatentImage", (LEFT, 940), (WIDE, 130), width=side, height=side, batch_size=1)
    read = 740
    if family.control_pictures:
        read = 1160  # all of its settings are shown, as one of the advanced ones is not its default
    dataset = graph.add(
        "GraftDataset",
        (420, 60),
        (340, read),
        folder="graft_demo/concept",
        resolution=family.resolution,
        repeats=1,
        control_pictures=family.control_pictures or "auto",
        frames=family.frames,
        frame_rate=family.frame_rate,
    )
    sheet = graph.add("PreviewImage", (420, 120 + read), (340, 260), "What was read")
    recipe = graph.add("GraftRecipe", (800, 60), (320, 240), steps=STEPS)
    why = graph.add("PreviewAny", (800, 360), (320, 300), "What the recipe chose, and why")
    start = graph.add("GraftTrainStart", (800, 720), (320, 360), run=name)
    step = graph.add("TrainStep", (1160, 60), (360, 760), steps=STEPS, preview_every=PREVIEWS)
    average = graph.add("EMAMerge", (1560, 60), (320, 600))
    save = graph.add("GraftSaveLoRA", (1560, 720), (320, 180), prefix=f"loras/{name}")
    settings = {
        "seed": 7,
        "steps": family.steps,
        "cfg": family.cfg,
        "sampler_name": "euler",
        "scheduler": family.scheduler,
    }
    sampler = graph.add("KSampler", (1920, 60), (300, 280), **settings)
    decode = graph.add("VAEDecode", (1920, 400), (220, 60))
    image = graph.add("SaveImage", (1920, 520), (400, 440), "With the LoRA", filename_prefix=f"{name}/trained")
    for target, inputs in (
        (prompt, ("clip",)),
        (negative, ("clip",)),
        (dataset, ("vae", "clip")),
        (recipe, ("model",)),
        (start, ("model", "clip", "vae")),
        (average, ("model", "clip")),
        (decode, ("vae",)),
    ):
        for wanted in inputs:
            graph.link(*outputs[wanted], target, wanted)
    graph.link(dataset, 0, start, "dataset")
    graph.link(dataset, 1, sheet, "images")
    graph.link(dataset, 0, recipe, "dataset")
    graph.link(recipe, 1, why, "source")
    settings_nodes = [dataset, sheet, recipe, why, start]
    if family.training_only:
        rows = json.dumps({"version": 1, "rows": [{"file": family.training_only, "on": True, "model": 1.0}]})
        adapter = graph.add("GraftLoRAStack", (420, 440 + read), (340, 280), "Training adapter", rows=rows)
        only = graph.add("GraftTrainingOnlyLoRA", (800, 440 + read), (320, 80))
        graph.link(adapter, 0, only, "lora_stack")
        graph.chain(recipe, only, start)
        settings_nodes += [adapter, only]
    else:
        graph.chain(recipe, start)
    graph.link(start, 0, step, "state")
    graph.link(prompt, 0, step, "positive")
    if family.guided_previews:
        graph.link(negative, 0, step, "negative")
    graph.link(latent, 0, step, "latent")
    graph.link(step, 0, average, "state")
    graph.link(average, 2, save, "lora_model")
    graph.link(average, 0, sampler, "model")
    graph.link(prompt, 0, sampler, "positive")
    graph.link(negative, 0, sampler, "negative")
    graph.link(latent, 0, sampler, "latent_image")
    graph.link(sampler, 0, decode, "samples")
    graph.link(decode, 0, image, "images")
    graph.group("The model and the prompts", "#3f789e", *loaders, prompt, negative, latent)
    graph.group("Images and settings", "#b58b2a", *settings_nodes)
    graph.group("Train", "#b58b2a", step)
    graph.group("The average of the weights, saved and tried", "#8A8", average, save, sampler, decode, image)
    return graph.document()


PAIR = (
    "# Train a LoRA for {title}",
    "Wan 2.2 14B is two models: the high-noise one makes the layout, the low-noise one finishes. One run trains both in"
    " turn, each on the noise levels that the sampler gives it, with one of them on the device at a time. Each gets a"
    " LoRA file of its own.",
    "**Files that it expects**",
    "{files}",
    "If one is missing, ComfyUI says its name and runs nothing.",
    "**Your images**, with captions beside them (`photo.png`, `photo.txt`): drop their folder onto *Dataset*, or choose"
    " one in ComfyUI's `input` folder from its list. Until then it trains on the demo's 16 images. Write what you train"
    " into *Prompt*, for the previews, which both models draw together.",
    "**Training Recipe** chooses adapter and optimizer for this model and your memory, and says why. Set *steps* there"
    " and in *Train Step* to the same number: each model is trained for that many. The noise levels are AI-Toolkit's"
    " for Wan 2.2, every one alike.",
    "The LoRAs are saved under `output/loras`, as `…_high_noise` and `…_low_noise`. You can stop at any time: queued"
    " again, the run continues.",
    "**For averaged weights**, put an *EMA Merge* with a *Save LoRA* behind each training state of *Split Expert Pair*."
    " **To train one model only**, use *Start Training* in place of *Start Training Expert Pair*, and choose *expert*"
    " in *Objective Settings*.",
)
SIDES = (("high noise", 1), ("low noise", 4))  # with the MODEL's output of Split Expert Pair
BOUNDARY_STEP = 10  # of 20: where ComfyUI's own template goes from one model to the other


def for_pair(classes: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Both experts of a pair in one run, with previews of both, a file for each, and an image of both."""
    name = family.title.lower().replace(" ", "")
    graph = Graph(classes, f"Train a LoRA for {family.title}")
    text = "\n\n".join(PAIR).format(title=family.title, files=_file_lines(family))
    graph.note(text, (LEFT - 560, 60), (500, 720))
    loaders = _loaders(graph, family)
    outputs = _outputs(loaders)
    second = graph.add(
        "UNETLoader", (LEFT, 560), (WIDE, 110), "Low noise", unet_name=family.low_noise_model, weight_dtype="default"
    )
    loaders[0]["title"] = "High noise"
    prompt = graph.add("CLIPTextEncode", (LEFT, 780), (WIDE, 130), "Prompt", text="a zorp middle")
    negative = graph.add("CLIPTextEncode", (LEFT, 970), (WIDE, 110), "Negative prompt", text="")
    side = family.resolution // 16 * 16
    latent = graph.add("EmptyLatentImage", (LEFT, 1140), (WIDE, 130), width=side, height=side, batch_size=1)
    dataset = graph.add(
        "GraftDataset", (420, 60), (340, 740), folder="graft_demo/concept", resolution=family.resolution, repeats=1
    )
    sheet = graph.add("PreviewImage", (420, 860), (340, 260), "What was read")
    recipe = graph.add("GraftRecipe", (1180, 60), (320, 240), steps=STEPS)
    why = graph.add("PreviewAny", (1180, 360), (320, 300), "What the recipe chose, and why")
    levels = {"timesteps": "uniform", "model_shift": False, "conditioning_dropout": 0.05}
    objective = graph.add("GraftObjective", (800, 60), (320, 700), expert="both", **levels)
    start = graph.add("GraftTrainPairStart", (1180, 720), (320, 360), run=name)
    step = graph.add("TrainStep", (1560, 60), (360, 780), steps=STEPS, preview_every=PREVIEWS)
    save = graph.add("GraftSaveLoRA", (1560, 900), (360, 160), prefix=f"loras/{name}")
    for target, wanted in (
        (prompt, "clip"),
        (negative, "clip"),
        (dataset, "vae"),
        (dataset, "clip"),
        (recipe, "model"),
        (start, "clip"),
        (start, "vae"),
    ):
        graph.link(*outputs[wanted], target, wanted)
    graph.link(*outputs["model"], start, "high_noise_model")
    graph.link(second, 0, start, "low_noise_model")
    for source, output, target, wanted in (
        (dataset, 0, recipe, "dataset"),
        (dataset, 1, sheet, "images"),
        (recipe, 1, why, "source"),
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
    graph.group("The two models and the prompts", "#3f789e", *loaders, second, prompt, negative, latent)
    graph.group("Images and settings", "#b58b2a", dataset, sheet, recipe, why, objective, start)
    graph.group("Both are trained in turn, and saved", "#b58b2a", step, save)
    _pair_sampled(graph, family, step, (prompt, negative, latent), outputs["vae"], name)
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
    split = graph.add("GraftSplitExperts", (1980, 60), (300, 160))
    graph.link(step, 0, split, "state")
    last = 10_000
    spans = ((0, BOUNDARY_STEP), (BOUNDARY_STEP, last))
    samplers = []
    for row, ((expert, output), (begin, end)) in enumerate(zip(SIDES, spans, strict=True)):
        is_first = row == 0
        sampler = graph.add(
            "KSamplerAdvanced",
            (1980, 280 + row * 420),
            (300, 340),
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
    decode = graph.add("VAEDecode", (2320, 60), (220, 60))
    image = graph.add("SaveImage", (2320, 180), (400, 440), "With both LoRAs", filename_prefix=f"{name}/trained")
    graph.link(latent, 0, samplers[0], "latent_image")
    graph.link(samplers[0], 0, samplers[1], "latent_image")
    graph.link(samplers[1], 0, decode, "samples")
    graph.link(*vae, decode, "vae")
    graph.link(decode, 0, image, "images")
    graph.group("The pair, tried", "#8A8", split, *samplers, decode, image)


def _loaders(graph: Graph, family: Family) -> list[dict[str, Any]]:
    nodes = []
    top = 60
    for kind, values in family.files:
        height = 50 + 30 * len(values)
        nodes.append(graph.add(kind, (LEFT, top), (WIDE, height), **values))
        top += height + 50
    return nodes


def _outputs(loaders: list[dict[str, Any]]) -> dict[str, tuple[dict[str, Any], int]]:
    """(loader, output) of the model, the CLIP and the VAE: of one checkpoint, or of three files."""
    names = ("model", "clip", "vae")
    if len(loaders) == 1:
        return {name: (loaders[0], number) for number, name in enumerate(names)}
    return {name: (loader, 0) for name, loader in zip(names, loaders, strict=True)}


def _file_lines(family: Family) -> str:
    lines = []
    for _, values in family.files:
        for name, file in values.items():
            if name in FOLDERS:
                lines.append(f"- `models/{FOLDERS[name]}/{file}`")
    if family.low_noise_model:
        lines.append(f"- `models/diffusion_models/{family.low_noise_model}`")
    if family.training_only:
        lines.append(f"- `models/loras/{family.training_only}`")
    return "\n".join(lines)


def templates(classes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Every template of this file, by its title, which is its file's name."""
    made = {FIRST: first(classes), LORAS: loras(classes), WORDS: words(classes), PREFERENCE: preference(classes)}
    made[DECODER] = decoder(classes)
    made[SLIDER] = slider(classes)
    made[SAMPLES] = from_graph(classes)
    made[FOLDERS_TITLE] = several_folders(classes)
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
