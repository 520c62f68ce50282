"""Writes locales/en/nodeDefs.json and node_list.json from the nodes' own declarations, after a change of a node's
texts: `python locales/write_english.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Where ComfyUI-Manager reads which nodes a pack has: its scan of the code sees no bases of classes.
NODE_LIST = HERE.parent / "node_list.json"

# Display names of the inputs that are sockets only. They are not in the declarations: the editor would make a
# display_name there the socket's label, store it in workflows, and show it in place of its translation.
SOCKETS = {
    "base": "base model",
    "captions": "list of captions",
    "clip": "CLIP",
    "conditioning": "conditioning",
    "dataset": "dataset",
    "empty": "empty conditioning",
    "initial": "initial LoRA",
    "latent": "latent",
    "latents": "latents",
    "lora_model": "trained LoRA",
    "lora_stack": "LoRA stack",
    "loss": "losses",
    "high_noise_model": "high noise model",
    "low_noise_model": "low noise model",
    "low_noise_settings": "low noise settings",
    "low_noise_training_only": "low noise training-only LoRA",
    "masks": "masks",
    "model": "model",
    "more_images": "more images",
    "negative": "negative prompt",
    "images": "images",
    "video": "video",
    "audio": "audio",
    "positive": "positive prompt",
    "previews": "previews",
    "regularization": "regularization dataset",
    "settings": "training settings",
    "snapshots": "snapshots",
    "state": "training state",
    "training_only": "training-only LoRA",
    "vae": "VAE",
    "validation_dataset": "validation dataset",
}

# Display names of the outputs whose names in the declarations are ids: workflows store those, so they stay. The editor
# looks for a name that is also the type's among `dataTypes` in main.json.
OUTPUTS = {
    "GRAFT_DATASET": "dataset",
    "GRAFT_SETTINGS": "training settings",
    "GRAFT_SNAPSHOTS": "snapshots",
    "LORA_MODEL": "LoRA",
    "LORA_STACK": "LoRA stack",
    "LOSS_MAP": "losses",
    "TRAIN_STATE": "training state",
}


def node_texts(nodes: Iterable[Any]) -> dict[str, Any]:
    """{node id: {display_name, description, inputs: {id: {name, tooltip}}, outputs: {place: {name}}}} of V3 node
    classes, by node id.
    """
    texts = {}
    for schema in sorted((node.define_schema() for node in nodes), key=lambda schema: schema.node_id):
        inputs, outputs = {}, {}
        for declared in schema.inputs:
            name = declared.display_name or SOCKETS[declared.id]
            inputs[declared.id] = {"name": name, "tooltip": declared.tooltip}
        for place, declared in enumerate(schema.outputs):
            name = declared.display_name or declared.io_type
            outputs[str(place)] = {"name": OUTPUTS.get(name, name)}
        texts[schema.node_id] = {
            "display_name": schema.display_name,
            "description": schema.description,
            "inputs": inputs,
            "outputs": outputs,
        }
    return texts


def main() -> None:
    """Write the files."""
    from graft_nodes.headless import embedded

    embedded.install()
    from graft_nodes.nodes import NODES

    texts = node_texts(NODES)
    titles = {node_id: text["display_name"] for node_id, text in texts.items()}
    for path, content in ((HERE / "en" / "nodeDefs.json", texts), (NODE_LIST, titles)):
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
