"""Textual inversions in LoRA files: their names in prompts, their text encoders, and what is refused."""

import pytest
import torch
from graft_nodes.patches.lora_files import embeddings
from graft_nodes.patches.lora_files.embeddings import TokenizerPart
from graft_nodes.patches.lora_files.entry import LoraEntry

SDXL = (TokenizerPart("clip_l", 6), TokenizerPart("clip_g", 10))
SD3 = (*SDXL, TokenizerPart("t5xxl", 8))


def _entry(name="a.safetensors", partial=False, **tensors):
    keys = {"lora_unet_x.alpha": torch.ones(())}
    for key, tensor in tensors.items():
        keys[key.replace("__", ".")] = tensor
    return LoraEntry(name, keys, partial=partial)


def _bundle(**tensors):
    return {f"bundle_emb__{key}": tensor for key, tensor in tensors.items()}


def test_each_text_encoder_gets_its_own_vectors():
    clip_l, clip_g, t5 = torch.rand(2, 6), torch.rand(2, 10), torch.rand(3, 8)
    entry = _entry(**_bundle(hat__clip_l=clip_l, hat__clip_g=clip_g, hat__t5=t5, cat__clip_g=clip_g[0]))
    reading = embeddings.read([entry], SD3)
    assert reading.problems == [] and [one.name for one in reading.embeddings] == ["hat", "cat"]
    hat, cat = (one.vectors for one in reading.embeddings)
    for part, expected in (("clip_l", clip_l), ("clip_g", clip_g), ("t5xxl", t5)):
        assert torch.equal(hat[part], expected)
    assert list(cat) == ["clip_g"] and torch.equal(cat["clip_g"], clip_g[:1])
    assert reading.report[0] == "embedding:hat from a.safetensors (clip_l: 2, clip_g: 2, t5xxl: 3 vectors)"


@pytest.mark.parametrize("key", ["bundle_emb.hat.string_to_param.*", "bundle_emb.hat.emb_params", "bundle_emb.hat"])
@pytest.mark.parametrize("part", SDXL)
def test_keys_without_a_text_encoder_go_by_width(key, part):
    vectors = torch.rand(2, part.width)
    (found,) = embeddings.read([_entry(**{key: vectors})], SDXL).embeddings
    assert found.name == "hat" and list(found.vectors) == [part.key]
    assert torch.equal(found.vectors[part.key], vectors)


# What OneTrainer's savers call the vectors of each model's text encoders (modules/modelSaver/*/*LoRASaver.py), by what
# ComfyUI's tokenizers call them.
ONETRAINER = {
    "StableDiffusion": {"clip_l": "clip_l"},
    "StableDiffusion, SD 2": {"clip_h": "clip_l"},
    "StableDiffusionXL": {"clip_l": "clip_l", "clip_g": "clip_g"},
    "StableDiffusion3": {"clip_l": "clip_l", "clip_g": "clip_g", "t5xxl": "t5"},
    "Flux": {"clip_l": "clip_l", "t5xxl": "t5"},
    "Chroma": {"t5xxl": "t5"},
    "Sana": {"gemma2_2b": "gemma"},
    "HunyuanVideo": {"clip_l": "clip_l", "llama": "llama"},
    "HiDream": {"clip_l": "clip_l", "clip_g": "clip_g", "t5xxl": "t5", "llama": "llama"},
}


@pytest.mark.parametrize("model", ONETRAINER)
def test_words_are_written_under_onetrainers_names_and_read_again(model):
    names = ONETRAINER[model]
    parts = tuple(TokenizerPart(key, 6 + number) for number, key in enumerate(names))
    vectors = {part.key: torch.rand(2, part.width) for part in parts}
    written = embeddings.bundle({"hat": vectors})
    assert {key: written[f"bundle_emb.hat.{name}"] is vectors[key] for key, name in names.items()} == dict.fromkeys(
        names, True
    )
    assert len(written) == len(names)
    old = {f"bundle_emb.hat.{key}": tensor for key, tensor in vectors.items()}
    for state in (written, old):
        (found,) = embeddings.read([LoraEntry("a.safetensors", state)], parts).embeddings
        assert found.vectors.keys() == vectors.keys()
        assert all(torch.equal(tensor, vectors[key]) for key, tensor in found.vectors.items())


def test_text_encoders_that_onetrainer_does_not_train_keep_comfyuis_names():
    words = {"hat": {key: torch.rand(1, 4) for key in ("umt5xxl", "qwen25_7b", "byt5_small", "gemma3_12b")}}
    assert embeddings.bundle(words).keys() == {f"bundle_emb.hat.{key}" for key in words["hat"]}


def test_sd_webui_reads_what_is_written():
    """extensions-builtin/Lora/networks.py cuts at the first two dots; textual_inversion.py then takes a dictionary of
    one tensor, or one with clip_l and clip_g.
    """
    for parts in (("clip_l",), ("clip_l", "clip_g")):
        written = embeddings.bundle({"hat": {part: torch.rand(1, 4) for part in parts}})
        embedding = {}
        for key, tensor in written.items():
            head, _, rest = key.partition(".")
            name, vectors = rest.split(".", 1)
            assert (head, name) == ("bundle_emb", "hat")
            embedding[vectors] = tensor
        assert len(embedding) == 1 or embedding.keys() == {"clip_l", "clip_g"}


def test_ai_toolkits_embedding_is_called_like_the_file():
    entry = _entry("hats\\my hat.safetensors", clip_l=torch.rand(2, 6), clip_g=torch.rand(2, 10))
    (found,) = embeddings.read([entry], SDXL).embeddings
    assert found.name == "my_hat" and set(found.vectors) == {"clip_l", "clip_g"}
    assert embeddings.prompt_names(entry.state_dict, entry.name) == ["my_hat"]


@pytest.mark.parametrize(
    ("written", "said"),
    [("<hat>", "hat"), ("v1.0", "v1.0"), ("my hat", "my_hat"), ("<>", "a"), ("", "a"), ("a:b (c)", "a_b_c")],
)
def test_names_that_a_prompt_can_hold(written, said):
    assert embeddings.prompt_names([f"bundle_emb.{written}.clip_l", "lora_unet_x.alpha"], "b/a.safetensors") == [said]


def test_sd2s_text_encoder_is_clip_l_in_onetrainer():
    (found,) = embeddings.read(
        [_entry(**_bundle(hat__clip_l=torch.rand(1, 4)))], [TokenizerPart("clip_h", 4)]
    ).embeddings
    assert list(found.vectors) == ["clip_h"]


OWN_CLIP = "connect the CLIP that it was trained on"
WRONG = {
    "another width": (torch.rand(2, 7), f"its vectors have 7 numbers, clip_l of this CLIP takes 6: {OWN_CLIP}"),
    "three dimensions": (
        torch.rand(1, 2, 6),
        r"expected vectors of 6 numbers for clip_l, got torch.float32 \(1, 2, 6\)",
    ),
    "no vectors": (torch.rand(0, 6), "expected vectors of 6 numbers for clip_l"),
    "integers": (torch.ones(2, 6, dtype=torch.int64), "expected vectors of 6 numbers for clip_l"),
    "NaN": (torch.full((2, 6), float("nan")), "holds NaN or infinite values"),
}


@pytest.mark.parametrize(("vectors", "problem"), WRONG.values(), ids=WRONG)
def test_wrong_vectors_are_refused_by_file_and_key(vectors, problem):
    given = _bundle(hat__clip_l=vectors, hat__clip_g=torch.rand(2, 10))
    (said,) = embeddings.read([_entry(**given)], SDXL).problems
    with pytest.raises(ValueError, match="a.safetensors: bundle_emb.hat.clip_l: " + problem):
        raise ValueError(said)
    partial = embeddings.read([_entry(partial=True, **given)], SDXL)
    assert not partial.problems and list(partial.embeddings[0].vectors) == ["clip_g"]
    assert "partial: bundle_emb.hat.clip_l is left out" in partial.report[0]


def test_no_text_encoder_of_any_width():
    (problem,) = embeddings.read([_entry(emb_params=torch.rand(2, 7))], SDXL).problems
    assert problem == f"a.safetensors: emb_params: its vectors have 7 numbers, clip_l of this CLIP takes 6: {OWN_CLIP}"


def test_what_the_clip_has_no_place_for_is_named():
    given = _bundle(hat__clip_l=torch.rand(1, 6), hat__llama=torch.rand(1, 6), hat__clip_l_out=torch.rand(1, 6))
    reading = embeddings.read([_entry(**given)], SDXL)
    assert list(reading.embeddings[0].vectors) == ["clip_l"]
    assert reading.report[:2] == [
        "a.safetensors: bundle_emb.hat.llama is left out, this CLIP has no llama (clip_l, clip_g)",
        "a.safetensors: bundle_emb.hat.clip_l_out is left out, it is added behind the text encoder, which ComfyUI has"
        " no place for",
    ]
    nowhere = embeddings.read([_entry(**_bundle(hat__clip_l=torch.rand(1, 6)))], ())
    assert not nowhere.embeddings and "this CLIP reads no embedding:NAME" in nowhere.report[0]


def test_the_first_of_two_with_one_name_counts():
    first, second = torch.rand(1, 6), torch.rand(1, 6)
    stack = [
        _entry("a.safetensors", **_bundle(hat__clip_l=first)),
        _entry("b.safetensors", **_bundle(hat__clip_l=second, cat__clip_l=second)),
    ]
    reading = embeddings.read(stack, SDXL)
    assert [(one.name, one.file) for one in reading.embeddings] == [("hat", "a.safetensors"), ("cat", "b.safetensors")]
    assert torch.equal(reading.embeddings[0].vectors["clip_l"], first)
    assert "b.safetensors: embedding:hat is left out, the one from a.safetensors comes first" in reading.report
    assert not embeddings.read(stack[:1], SDXL, {"hat": "z.safetensors"}).embeddings


def test_twice_in_one_file():
    given = _bundle(hat__clip_l=torch.rand(1, 6), hat__emb_params=torch.rand(1, 6))
    (problem,) = embeddings.read([_entry(**given)], SDXL).problems
    assert problem.endswith("bundle_emb.hat.emb_params: the file has vectors of embedding:hat for clip_l twice")
