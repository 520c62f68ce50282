"""The template of a slider as it is: the hue that the pixel rule sees follows the strength."""

import numpy as np
import pytest
from graft_nodes.demo import rule

STRENGTHS = np.linspace(-3, 3, 9)


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
