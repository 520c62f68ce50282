"""Words trained with every family of models: with its own tokenizers and its text encoders of ComfyUI's classes, tiny
and random.
"""

import pytest
import torch
from families import build, latent
from graft_nodes import host as wall
from graft_nodes.training.data.dataset import Dataset
from tiny_encoders import ENCODERS, MORE, OF_FAMILY, OTHERS, clip_of
from tiny_families import EVERY

WORD = "sks_hat"
CAPTIONS = ["a red sks_hat, square", "sks_hat"]
CALLED = {"ministral3_3b": "mistral3_24b"}  # ERNIE-Image's tokenizer has Mistral's name for embeddings
UNREAD = {"byt5_small"}  # reads what stands in quotes
REMARKS = {"ace-step 1.5": ", slowly: its language model writes codes for every caption"}
TOO_LARGE = {"ltx 2": ({},), "ltx 2 sound": ({},)}  # without text encoders among the tiny ones
# Their text encoders' code, or what it makes of a mask, needs numbers, so that their memory is not planned.
NEED_NUMBERS = {"pixart", "omnigen2", "anima", "cosmos", "ernie", "hidream", "ace-step 1.5"}
REFUSED = {"hidream o1": ("has no tokenizer that reads embedding:NAME", "no: its prompt is tokens, without vectors")}


def _encode(clip, text):
    with torch.inference_mode():
        context, extras = clip.encode_from_tokens_scheduled(clip.tokenize(text))[0]
        return [context.clone(), *(t.clone() for t in extras.values() if isinstance(t, torch.Tensor))]


def _start(host, name, monkeypatch):
    """(CLIP, what Start Training is given) for a word alone."""
    encoder = OF_FAMILY.get(name, name)
    *_, changes = {**ENCODERS, **MORE, **OTHERS, **TOO_LARGE}[encoder]
    with torch.inference_mode():
        model = build(name, **changes)
    if encoder in TOO_LARGE:
        pytest.skip("parts of its text encoder have one size, of gigabytes")
    clip = clip_of(encoder, monkeypatch)
    conditionings = wall.encoding.encode_captions(clip, ["", *CAPTIONS])
    data = Dataset.from_latents([latent(name, seed) for seed in range(2)], CAPTIONS, conditionings)
    given = {"words": WORD, "initial": "the brown fox", "learning_rate": 0.02, "alone": True, "max_norm": 0.0}
    (words,) = host.call("GraftWords", **given)
    (optimizer,) = host.call("GraftOptimizer", learning_rate=1e-2, batch_size=2, total_steps=4)
    return clip, {"model": model, "clip": clip, "dataset": data, "optimizer": optimizer, "words": words}


@pytest.mark.column("words")
@pytest.mark.parametrize("name", EVERY)
def test_a_word_moves_in_every_text_encoder_that_reads_it(host, name, monkeypatch, record_property):
    clip, given = _start(host, name, monkeypatch)
    if name in REFUSED:
        error, says = REFUSED[name]
        with pytest.raises(ValueError, match=error):
            host.call("GraftTrainStart", **given, run=f"word {name}")
        record_property("says", says)
        return
    state, report = host.call("GraftTrainStart", **given, run=f"word {name}")
    assert ("is planned to take" in report) == (name not in NEED_NUMBERS), report
    parts = [key.rpartition(".")[2] for key in state.trained]
    expected = {CALLED.get(part, part) for part in {**ENCODERS, **MORE, **OTHERS}[OF_FAMILY.get(name, name)][3]}
    assert set(parts) == expected - UNREAD
    trained, _, patched, *_ = host.call("TrainStep", state=state, steps=1, validate_every=0)
    for key, vectors in state.trained.items():
        moved = (trained.trained[key] - vectors).abs().amax(dim=1)
        assert (moved > 0).all(), f"{key}: {moved}"
    prompt = f"a red embedding:{WORD} , square"
    plain, read = _encode(clip, prompt), _encode(patched, prompt)
    assert any(one.shape != other.shape or not torch.equal(one, other) for one, other in zip(plain, read, strict=True))
    record_property("says", ", ".join(parts) + REMARKS.get(name, ""))
