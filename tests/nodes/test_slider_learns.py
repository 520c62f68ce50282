"""Sliders on the demo model: the hue that the pixel rule sees follows the strength. From prompts it is the template as
it is; from pairs of pictures, a folder with one picture in two colors each.
"""

import os

import numpy as np
import pytest
from graft_nodes.demo import draw, rule, score
from PIL import Image

STRENGTHS = np.linspace(-3, 3, 9)
PROMPT = "a yellow circle middle"


def _hue(picture):
    """Degrees, from -60 (pink) over red and yellow to green and blue."""
    return (rule.detect(picture).hue + 60) % 360 - 60


def _drawn(graph):
    """{strength: the link to its pictures}, 0 for those of the model alone."""
    links = {}
    for node_id, node in graph.items():
        if node["class_type"] == "VAEDecode":
            sampler = graph[node["inputs"]["samples"][0]]
            strength = graph[sampler["inputs"]["model"][0]]["inputs"].get("lora_strength", 0.0)
            links[strength] = [node_id, 0]
    return links


@pytest.mark.long
def test_the_hue_follows_the_strength(host):
    graph = host.template("Train a slider")
    (step,) = (node_id for node_id, node in graph.items() if node["class_type"] == "TrainStep")
    patches = [node["inputs"] for node in graph.values() if node["class_type"] == "LoRAStackPatch"]
    assert [patch["lora_strength"] for patch in patches] == [-3.0, -1.5, 1.5, 3.0]
    host.fresh()
    hues = {}
    for strengths in (None, (-2.25, -0.75, 0.75, 2.25)):  # the template's, then those between them
        if strengths:
            for patch, strength in zip(patches, strengths, strict=True):
                patch["lora_strength"] = strength
        drawn = _drawn(graph)
        capture = {str(strength): link for strength, link in drawn.items()}
        result = host.run(graph, {"state": [step, 0], **capture})
        assert result["success"], result["errors"]
        found = result["captured"]
        assert (step in result["cached"]) == bool(strengths), "nothing is trained twice"
        for strength in drawn:
            pictures = found[str(strength)].numpy()
            assert pictures.shape == (4, 256, 256, 3)
            hues[strength] = float(np.mean([_hue(picture) for picture in pictures]))
    assert sorted(hues) == list(STRENGTHS)
    seen = [hues[strength] for strength in STRENGTHS]
    said = ", ".join(f"{strength:+.2f}: {hue:.0f}" for strength, hue in zip(STRENGTHS, seen, strict=True))
    assert np.corrcoef(STRENGTHS, seen)[0, 1] >= 0.9, said
    assert seen[-1] - seen[0] >= 30, said
    assert seen == sorted(seen), said
    validation = found["state"].history.validation
    assert validation[-1][1] < validation[0][1], validation


def _pairs(host):
    """Eight pairs: a green circle, and the same one in red, with the caption of a yellow one."""
    folder = os.path.join(host.input, "color pairs")
    os.makedirs(folder, exist_ok=True)
    for number in range(8):
        for side, color in (("win", "green"), ("lose", "red")):
            pixels = draw.draw_image("circle", color, "middle", np.random.default_rng(number))
            Image.fromarray(pixels).save(os.path.join(folder, f"{number}.{side}.png"))
        with open(os.path.join(folder, f"{number}.txt"), "w", encoding="utf-8") as file:
            file.write(PROMPT)
    return "color pairs"


@pytest.mark.slow
def test_the_hue_follows_the_strength_of_pairs(host):
    model, clip, vae = host.call("GraftDemo")[:3]
    (pictures, *_) = host.call("GraftDataset", folder=_pairs(host), vae=vae, clip=clip, resolution=256, validation=0.2)
    data, _ = host.call("GraftSlider", method="picture pairs", dataset=pictures)
    (adapter,) = host.call("GraftAdapter", rank=8)
    (optimizer,) = host.call("GraftOptimizer", learning_rate=0.003, batch_size=4, total_steps=30)
    given = {"model": model, "dataset": data, "adapter": adapter, "optimizer": optimizer}
    state, _ = host.call("GraftTrainStart", **given, run="pairs learn")
    made = host.call("TrainStep", state=state, steps=30, validate_every=0)
    seen = []
    for strength in STRENGTHS:
        (patched, *_) = host.call("LoRAStackPatch", model=model, lora_model=made[3], lora_strength=float(strength))
        drawn = score.sample(patched, clip, vae, [PROMPT] * 2, seed=5, steps=10)
        seen.append(float(np.mean([_hue(picture) for picture in drawn])))
    said = ", ".join(f"{strength:+.2f}: {hue:.0f}" for strength, hue in zip(STRENGTHS, seen, strict=True))
    assert np.corrcoef(STRENGTHS, seen)[0, 1] >= 0.9, said
    assert seen[-1] - seen[0] >= 30, said
