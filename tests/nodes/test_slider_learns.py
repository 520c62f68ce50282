"""A slider between two colors of the demo model: the hue that the pixel rule sees follows the strength."""

import numpy as np
import pytest
from graft_nodes.demo import rule, score

STRENGTHS = np.linspace(-3, 3, 9)
PROMPT = "a yellow circle middle"


def _hue(picture):
    """Degrees, from -60 (pink) over red and yellow to green and blue."""
    return (rule.detect(picture).hue + 60) % 360 - 60


@pytest.mark.slow
def test_the_hue_follows_the_strength(host):
    model, clip, vae = host.call("GraftDemo")[:3]
    ends = {"positive": "a green circle middle", "negative": "a red circle middle", "target": PROMPT}
    sizes = {"width": 256, "height": 256, "steps": 5, "cfg": 1.0}
    data, _ = host.call("GraftSlider", **ends, **sizes, guidance=0.4, clip=clip, vae=vae)
    (adapter,) = host.call("GraftAdapter", rank=8)
    (optimizer,) = host.call("GraftOptimizer", learning_rate=0.003, batch_size=4)
    given = {"model": model, "dataset": data, "adapter": adapter, "optimizer": optimizer}
    state, _ = host.call("GraftTrainStart", **given, run="slider learns")
    made = host.call("TrainStep", state=state, steps=30, validate_every=30)
    hues = []
    for strength in STRENGTHS:
        patched = model
        if strength:
            patched = host.call("LoRAStackPatch", model=model, lora_model=made[3], lora_strength=float(strength))[0]
        pictures = score.sample(patched, clip, vae, [PROMPT] * 4, seed=5)
        hues.append(float(np.mean([_hue(picture) for picture in pictures])))
    said = ", ".join(f"{strength:+.2f}: {hue:.0f}" for strength, hue in zip(STRENGTHS, hues, strict=True))
    assert np.corrcoef(STRENGTHS, hues)[0, 1] >= 0.9, said
    assert hues[-1] - hues[0] >= 30, said
    assert hues == sorted(hues), said
    validation = made[0].history.validation
    assert validation[-1][1] < validation[0][1], validation
