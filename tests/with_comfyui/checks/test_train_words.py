"""Words trained on text encoders of ComfyUI's own classes: every encoder learns, gradients are those of finite
differences, and ComfyUI's own embeddings folder reads what was saved.
"""

import copy
import json
import os

import comfy.supported_models
import pytest
import torch
from families import build, latent
from graft_nodes import host as wall
from graft_nodes.host import embeddings
from graft_nodes.training import state as states
from graft_nodes.training.data.dataset import Dataset
from graft_nodes.training.run import step as steps
from graft_nodes.training.run import workspace
from safetensors.torch import load_file, save_file
from slopes import slope_along
from tiny_encoders import ENCODERS, clip_of
from tiny_families import FAMILIES

WORD = "sks_hat"
READ = list(ENCODERS)
CAPTIONS = ["a red sks_hat, square", "sks_hat"]  # inside a caption, and as all of it


def _encode(clip, text):
    with torch.inference_mode():
        context, extras = clip.encode_from_tokens_scheduled(clip.tokenize(text))[0]
        return [context.clone(), *(t.clone() for t in extras.values() if isinstance(t, torch.Tensor))]


def _begun(host, name, monkeypatch, held_out=(), **settings):
    """(MODEL, CLIP, a state at step 0 that trains a word alone)."""
    if not hasattr(comfy.supported_models, FAMILIES[name].supported):
        pytest.skip(f"this ComfyUI has no {FAMILIES[name].supported}")
    clip = clip_of(name, monkeypatch)
    with torch.inference_mode():
        model = build(name, **ENCODERS[name][-1])
    conditionings = wall.encoding.encode_captions(clip, ["", *CAPTIONS])
    captions = [CAPTIONS[seed % 2] for seed in range(2 + len(held_out))]
    latents = [latent(name, seed) for seed in range(len(captions))]
    data = Dataset.from_latents(latents, captions, conditionings, held_out=list(held_out))
    given = {"words": WORD, "initial": "the brown fox", "learning_rate": 0.02, "alone": True, "max_norm": 0.0}
    (words,) = host.call("GraftWords", **{**given, **settings})
    (optimizer,) = host.call("GraftOptimizer", learning_rate=1e-2, batch_size=2, total_steps=4)
    given = {"model": model, "clip": clip, "dataset": data, "optimizer": optimizer, "words": words}
    state, _ = host.call("GraftTrainStart", **given, run=f"words {name}")
    return model, clip, state


@pytest.mark.parametrize("name", READ)
def test_every_encoder_learns_the_word_and_comfyui_reads_what_is_saved(host, name, tmp_path, monkeypatch):
    model, clip, state = _begun(host, name, monkeypatch)
    parts = {key.rpartition(".")[2] for key in state.trained}
    assert parts == set(ENCODERS[name][3])
    assert all(len(vectors) >= 3 for vectors in state.trained.values())
    before = {key: t.clone() for key, t in clip.cond_stage_model.state_dict().items()}
    made = host.call("TrainStep", state=state, steps=2, validate_every=0)
    trained, patched, lora = made[0], made[2], made[3]
    assert all(not torch.equal(t, state.trained[key]) for key, t in trained.trained.items())
    assert all(torch.equal(t, before[key]) for key, t in clip.cond_stage_model.state_dict().items())
    # what training computed is what a prompt gets from the CLIP that comes out, and from ComfyUI's embeddings folder
    monkeypatch.setattr("folder_paths.get_folder_paths", lambda kind: [str(tmp_path)])
    (path,) = host.call("GraftSaveWords", lora_model=lora)
    assert path == str(tmp_path / f"{WORD}.safetensors") and load_file(path).keys() == parts
    theirs = clip.clone()
    theirs.tokenizer = copy.copy(clip.tokenizer)
    for attribute, part in list(embeddings.parts_of(clip.tokenizer)):
        setattr(theirs.tokenizer, attribute, copy.copy(part))
        getattr(theirs.tokenizer, attribute).embedding_directory = str(tmp_path)
    words = {WORD: {key.rpartition(".")[2]: t for key, t in trained.trained.items()}}
    for caption in CAPTIONS:
        prompt = caption.replace(WORD, f"embedding:{WORD} ")
        if name == "qwen":  # whose tokenizer in ComfyUI compares every token with a number
            with pytest.raises(RuntimeError, match="ambiguous"):
                _encode(theirs, prompt)
            expected = _encode(patched, prompt)
        else:
            expected = _encode(theirs, prompt)
        for wanted, found in zip(expected, _encode(patched, prompt), strict=True):
            assert torch.equal(found, wanted)
        with torch.inference_mode(False), torch.no_grad(), wall.denoiser.open_denoiser(model, clip=clip) as denoiser:
            (live,) = denoiser.encode([caption], [next(iter(state.subject.dataset.conditionings.values()))], words)
        assert torch.allclose(live.context.float(), expected[0].float(), atol=1e-4)
        assert not torch.allclose(
            _encode(clip, caption)[0][:, : expected[0].shape[1]].mean(), expected[0].mean(), atol=1e-6
        )


@pytest.mark.parametrize("name", READ)
def test_gradients_of_the_words_are_those_of_finite_differences(host, name, monkeypatch):
    model, clip, state = _begun(host, name, monkeypatch)
    with torch.inference_mode(False), wall.denoiser.open_denoiser(model, clip=clip) as denoiser:
        work = workspace.Workspace(state, denoiser, state.subject.dataset)
        try:
            with work.install():
                (batch, *_) = work.loader.take(work.step, 0)

                def loss():
                    return steps.batch_losses(work, batch, torch.Generator().manual_seed(0), {}).double().sum()

                loss().backward()
                for key, vectors in work.trained.items():
                    gradient = vectors.grad.clone()
                    assert gradient.abs().max() > 0, key
                    way = gradient / gradient.norm() * vectors.detach().norm()
                    slope = slope_along(work.trained, {key: way}, loss, (0.004, 0.002))
                    assert float((gradient * way).sum()) == pytest.approx(slope, rel=5e-2), key
        finally:
            work.close()


@pytest.mark.parametrize("name", ["sdxl", "qwen"])
def test_two_calls_are_one_and_held_out_pictures_are_measured(host, name, monkeypatch):
    _, _, state = _begun(host, name, monkeypatch, held_out=[2])
    whole = host.call("TrainStep", state=state, steps=2, validate_every=1)[0]
    half = host.call("TrainStep", state=state, steps=1, validate_every=1)[0]
    parts = host.call("TrainStep", state=half, steps=1, validate_every=1)[0]
    assert states.equal(whole, parts) and whole.history.loss == parts.history.loss
    assert all(torch.equal(t, parts.trained[key]) for key, t in whole.trained.items())
    assert all(torch.equal(t, parts.optimizer[key]) for key, t in whole.optimizer.items())
    assert whole.history.validation == parts.history.validation
    assert [step for step, _ in whole.history.validation] == [0, 1, 2]
    assert len({loss for _, loss in whole.history.validation}) == 3


@pytest.mark.parametrize("name", ["sdxl", "flux", "qwen"])
def test_no_vector_gets_longer_than_the_bound(host, name, monkeypatch):
    """The bound of each text encoder is a multiple of the mean norm of its own table, in float64."""
    _, clip, state = _begun(host, name, monkeypatch, max_norm=1.5, learning_rate=5.0)
    expected = {}
    for attribute, part in embeddings.parts_of(clip.tokenizer):
        table = next(embeddings.table_of(clip, attribute, part).parameters())
        expected[part.embedding_key] = 1.5 * float(table.double().norm(dim=1).mean())
    assert dict(state.start.words.bounds) == pytest.approx(expected, rel=1e-6)
    (trained, *_) = host.call("TrainStep", state=state, steps=1, validate_every=0)
    for key, vectors in trained.trained.items():
        norms = vectors.double().norm(dim=1)
        assert torch.allclose(norms, torch.full_like(norms, expected[key.rpartition(".")[2]]), rtol=1e-5)


def test_a_word_that_a_tokenizer_knows_is_refused(host, monkeypatch):
    model, clip, state = _begun(host, "sdxl", monkeypatch)
    dataset = state.subject.dataset
    given = {"model": model, "clip": clip, "dataset": dataset, "run": "known"}
    words = {"learning_rate": 0.0, "alone": True}
    (known,) = host.call("GraftWords", words="square", initial="cat", **words)
    with pytest.raises(ValueError, match="'square' is a token of its own in clip_l and clip_g"):
        host.call("GraftTrainStart", **given, words=known)
    (long,) = host.call("GraftWords", words=WORD, initial="orange cat " * 38, **words)
    with pytest.raises(ValueError, match=f"{WORD} would have 76 vectors in clip_l, which reads 75 tokens at once"):
        host.call("GraftTrainStart", **given, words=long)


def test_words_start_from_an_embedding_of_comfyui_s_folder_whose_width_fits(host, tmp_path, monkeypatch):
    """SDXL has vectors for both of its text encoders; those of SD 1 are wider than this CLIP-L's, and lack CLIP-G's."""
    model, _, state = _begun(host, "sdxl", monkeypatch)
    clip = clip_of("sdxl", monkeypatch, embeddings=str(tmp_path))
    fitting = {"clip_l": torch.ones(2, 4), "clip_g": 2 * torch.ones(2, 8)}
    save_file(fitting, tmp_path / "fits.safetensors")
    save_file({**fitting, "clip_l": torch.ones(2, 12)}, tmp_path / "wide.safetensors")
    save_file({"emb_params": torch.ones(2, 12)}, tmp_path / "sd1.safetensors")
    given = {"model": model, "clip": clip, "dataset": state.subject.dataset, "run": "from an embedding"}
    asked = {"words": WORD, "learning_rate": 0.0, "alone": True}
    (words,) = host.call("GraftWords", initial="embedding:fits", **asked)
    begun, _ = host.call("GraftTrainStart", **given, words=words)
    assert {key.rpartition(".")[2]: t.tolist() for key, t in begun.trained.items()} == {
        part: vectors.tolist() for part, vectors in fitting.items()
    }
    for name in ("wide", "sd1", "nowhere"):
        (words,) = host.call("GraftWords", initial=f"a embedding:{name}", **asked)
        said = f"has an embedding {name} with vectors of 4 numbers for clip_l: write a word, or another embedding"
        with pytest.raises(ValueError, match=said):
            host.call("GraftTrainStart", **given, words=words)


@pytest.mark.parametrize("name", READ)
def test_every_encoder_takes_the_number_of_vectors_that_is_asked_for(host, name, monkeypatch):
    """Their rows are those of the initial words' tokens, from the first one again or cut off."""
    whole = _begun(host, name, monkeypatch)[-1].trained
    for count in (1, 9):
        begun = _begun(host, name, monkeypatch, count=count)[-1].trained
        assert begun.keys() == whole.keys()
        for key, vectors in begun.items():
            assert torch.equal(vectors, whole[key][[i % len(whole[key]) for i in range(count)]])


def test_a_lora_file_with_words_is_read_by_lora_stack(host, monkeypatch):
    """Its keys are those of OneTrainer's savers for SD 1 and SDXL."""
    for name in ("sd1", "sdxl"):
        model, _, state = _begun(host, name, monkeypatch)
        made = host.call("TrainStep", state=state, steps=1, validate_every=0)
        (path,) = host.call("GraftSaveLoRA", state=made[0], prefix=f"loras/{name}_words")
        keys = set(load_file(path))
        if name == "sd1":
            assert keys == {f"bundle_emb.{WORD}.clip_l"}
        else:
            assert keys == {f"bundle_emb.{WORD}.clip_l", f"bundle_emb.{WORD}.clip_g"}
        os.replace(path, os.path.join(host.models, "loras", f"{name}_words.safetensors"))
        clip = clip_of(name, monkeypatch)
        _, patched, _ = host.call("GraftLoadLoRAs", model=model, rows=_rows(f"{name}_words.safetensors"), clip=clip)
        for found, wanted in zip(
            _encode(patched, f"a embedding:{WORD}"), _encode(made[2], f"a embedding:{WORD}"), strict=True
        ):
            assert torch.equal(found, wanted)


def _rows(file):
    return json.dumps({"version": 1, "rows": [{"file": file}]})
