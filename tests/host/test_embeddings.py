"""Embeddings in LoRA files reach the CLIP of a stack node: tokens and conditioning as from the host's own embeddings,
whichever form its tokenizers answer in.
"""

import json
import os
import types

import pytest
import torch
from graft_nodes.host import embeddings, fingerprint
from safetensors.torch import save_file

from ..nodes import conftest as node_models

WIDTH = 6


class Part:
    """A tokenizer of one text encoder that finds embeddings as ComfyUI's do; its folder is a dict."""

    embedding_size = 768  # not the width of the small text encoder below
    says_name = False

    def __init__(self, key, embedding_directory):
        self.embedding_key, self.embedding_directory = key, embedding_directory

    def _try_get_embedding(self, text):
        name, *leftover = text.split()
        answer = dict(self.embedding_directory or {}).get(name)
        if self.says_name:
            return answer, name, " ".join(leftover)
        return answer, " ".join(leftover)

    def tokenize_with_weights(self, text):
        tokens = []
        for piece in text.split(" embedding:"):
            found = None
            if tokens and self.embedding_directory is not None:
                found, *_, piece = self._try_get_embedding(piece)
            if found is not None:
                tokens += [(vector, 1.0) for vector in found]
            tokens += [(len(word), 1.0) for word in piece.split()]
        return [tokens]


class NamingPart(Part):
    says_name = True


class Tokenizer:
    def __init__(self, part, embedding_directory):
        self.clip_l, self.clip_g = (part(key, embedding_directory) for key in ("clip_l", "clip_g"))

    def tokenize_with_weights(self, text, *_, **__):
        return {part: getattr(self, part).tokenize_with_weights(text) for part in ("clip_l", "clip_g")}


class Encoder(torch.nn.Module):
    """The mean of the vectors of words and embeddings, of two text encoders."""

    def __init__(self, **_):
        super().__init__()
        self.dtypes = {torch.float32}
        self.clip_l, self.clip_g = (torch.nn.Module() for _ in range(2))
        for number, part in enumerate((self.clip_l, self.clip_g)):
            table = torch.nn.Embedding(16, WIDTH + number)
            part.transformer = torch.nn.Module()
            part.transformer.table = table
            part.transformer.get_input_embeddings = lambda table=table: table

    def reset_clip_options(self):
        pass

    def set_clip_options(self, options):
        pass

    def encode_token_weights(self, tokens):
        means = []
        for name, ((*pairs,),) in tokens.items():
            table = getattr(self, name).transformer.table
            vectors = [token if torch.is_tensor(token) else table.weight[token] for token, _ in pairs]
            means.append(torch.stack(vectors).mean(0))
        return torch.cat(means)[None, None], None


@pytest.fixture(params=[Part, NamingPart], ids=["two values", "three values"])
def clip(host, request):
    """`make(**embeddings)`: a CLIP with these in the host's folder."""
    import comfy.sd

    def make(**found):
        torch.manual_seed(0)
        target = types.SimpleNamespace(params={}, clip=Encoder, tokenizer=lambda **_: Tokenizer(request.param, found))
        return comfy.sd.CLIP(target, model_options={"dtype": torch.float32})

    return make


@pytest.fixture
def model(host):
    import comfy.model_management

    yield node_models.build_unet()
    comfy.model_management.unload_all_models()


@pytest.fixture
def save(host, model):
    """`save("a", hat=...)`: a LoRA file with embeddings; returns its row."""

    def save(name, strength=1.0, **bundle):
        keys = {f"bundle_emb.{word}.{part}": t for word, parts in bundle.items() for part, t in parts.items()}
        save_file(node_models.build_lora(model) | keys, os.path.join(host.models, "loras", f"{name}.safetensors"))
        return {"file": f"{name}.safetensors", "model": strength, "clip": strength}

    return save


@pytest.fixture
def save_alone(host):
    """`save_alone("a", hat=...)`: a LoRA file with embeddings and no weights; returns its row."""

    def save(name, **bundle):
        keys = {f"bundle_emb.{word}.{part}": t for word, parts in bundle.items() for part, t in parts.items()}
        save_file(keys, os.path.join(host.models, "loras", f"{name}.safetensors"))
        return {"file": f"{name}.safetensors"}

    return save


def _load(host, model, clip, *rows):
    listed = json.dumps({"version": 1, "rows": list(rows)})
    _, patched, report = host.call("GraftLoadLoRAs", model=model, rows=listed, clip=clip)
    return patched, report


def _encode(clip, text):
    with torch.inference_mode():
        return clip.encode_from_tokens(clip.tokenize(text))


def _vectors(seed):
    draws = torch.Generator().manual_seed(seed)
    return {part: torch.randn(2, width, generator=draws) for part, width in (("clip_l", 6), ("clip_g", 7))}


def test_prompts_find_them(host, model, clip, save):
    hat = _vectors(1)
    own = clip()
    for part, vectors in hat.items():
        getattr(own.tokenizer, part).embedding_directory = {"hat": vectors}
    plain = clip()
    tokenizer, before = plain.tokenizer, _encode(plain, "a red embedding:hat square")
    patched, report = _load(host, model, plain, save("a", hat=hat))
    assert "embedding:hat from a.safetensors (clip_g: 2, clip_l: 2 vectors)" in report
    expected = _encode(own, "a red embedding:hat square")
    assert torch.equal(_encode(patched, "a red embedding:hat square"), expected)
    assert torch.equal(_encode(patched.clone(), "a red embedding:hat square"), expected)
    assert not torch.equal(before, expected)
    assert plain.tokenizer is tokenizer and torch.equal(_encode(plain, "a red embedding:hat square"), before)


def test_every_other_name_is_looked_up_as_before(host, model, clip, save):
    own = clip(own=torch.ones(1, 6), hat=torch.zeros(1, 6))
    own.tokenizer.clip_g.embedding_directory = {"own": torch.ones(1, 7), "hat": torch.zeros(1, 7)}
    patched, _ = _load(host, model, own, save("a", hat={"clip_l": torch.ones(2, 6)}))
    for text in ("a embedding:own b", "a embedding:nowhere b", "a b"):
        assert torch.equal(_encode(patched, text), _encode(own, text))
    tokens = patched.tokenize("a embedding:hat, b")
    assert len(tokens["clip_l"][0]) == 5  # "a", two vectors, ",", "b"
    assert len(tokens["clip_g"][0]) == 3  # no vectors: not those of a file that happens to have this name


def test_a_clip_without_a_folder_of_embeddings(host, model, clip, save):
    bare = clip()
    for part in (bare.tokenizer.clip_l, bare.tokenizer.clip_g):
        part.embedding_directory = None
    patched, _ = _load(host, model, bare, save("a", hat=_vectors(1)))
    assert [len(chunk[0]) for chunk in patched.tokenize("a embedding:hat b").values()] == [4, 4]


def test_words_come_with_a_row_that_is_on(host, model, clip, save):
    on, off = save("a", hat=_vectors(1)), {**save("b", cat=_vectors(2)), "on": False}
    for row in (off, save("b", 0.0, cat=_vectors(2))):
        patched, report = _load(host, model, clip(), on, row)
        assert "embedding:hat from a.safetensors" in report and "cat" not in report
        assert [one.name for one in patched.tokenizer.graft_embeddings.embeddings] == ["hat"]
    model_only, report = _load(host, model, clip(), {**on, "clip": 0.0})
    assert "embedding:hat from a.safetensors" in report and model_only.tokenizer.graft_embeddings
    nothing = clip()
    assert _load(host, model, nothing, off)[0].tokenizer is nothing.tokenizer


def test_two_nodes_in_a_row(host, model, clip, save):
    first, second = _vectors(1), _vectors(2)
    once, _ = _load(host, model, clip(), save("a", hat=first))
    twice, report = _load(host, model, once, save("b", hat=_vectors(3), cat=second))
    assert "b.safetensors: embedding:hat is left out, the one from a.safetensors comes first" in report
    assert "embedding:cat from b.safetensors" in report
    tokens = twice.tokenize("x embedding:hat embedding:cat")["clip_l"][0]
    found = torch.stack([token for token, _ in tokens[1:]])
    assert torch.equal(found, torch.cat((first["clip_l"], second["clip_l"])))


def test_a_file_of_embeddings_only(host, model, clip, save, save_alone):
    """The CLIP gets them as from a LoRA with weights; the model stays as it is."""
    hat = _vectors(1)
    with_weights, _ = _load(host, model, clip(), save("a", hat=hat))
    patched_model, patched, report = host.call(
        "GraftLoadLoRAs", model=model, rows=json.dumps({"version": 1, "rows": [save_alone("b", hat=hat)]}), clip=clip()
    )
    assert report.splitlines() == [
        "b.safetensors: no weights for the model, 1 embedding",
        "embedding:hat from b.safetensors (clip_g: 2, clip_l: 2 vectors)",
    ]
    text = "a red embedding:hat square"
    assert torch.equal(_encode(patched, text), _encode(with_weights, text))
    assert patched_model is model and not patched.patcher.patches
    cat = {"clip_l": torch.ones(1, 6)}
    _, report = _load(host, model, clip(), save_alone("c", hat=hat, cat=cat), save("d"))
    assert "c.safetensors: no weights for the model, 2 embeddings\n" in report and "embedding:cat from c" in report
    assert "d.safetensors: " in report and "weights of the model at 1" in report


def test_a_file_of_embeddings_only_is_refused_where_no_clip_gets_them(host, model, clip, save_alone):
    row = save_alone("a", hat=_vectors(1))
    stack = host.call("GraftLoRAStack", rows=json.dumps({"version": 1, "rows": [row]}))[0]
    said = (
        r"a.safetensors cannot be used:\n.*it holds embeddings only \(hat\): .* put the file on a CLIP with Load LoRAs"
    )
    for node, given in (
        ("GraftLoadLoRAs", {"rows": json.dumps({"version": 1, "rows": [row]})}),
        ("LoRAStackPatch", {"lora_stack": stack}),
        ("GraftMergeLoRAs", {"lora_stack": stack, "clip": clip()}),
    ):
        with pytest.raises(ValueError, match=said):
            host.call(node, model=model, **given)


def test_a_file_for_another_text_encoder_is_refused_whole(host, model, clip, save):
    untouched = clip()
    tokenizer = untouched.tokenizer
    with pytest.raises(ValueError, match=r"a.safetensors: bundle_emb.hat.clip_l: its vectors have 768"):
        _load(host, model, untouched, save("a", hat={"clip_l": torch.ones(1, 768)}))
    assert untouched.tokenizer is tokenizer


def test_without_clip_the_report_says_what_to_do(host, model, save):
    row = save("a", hat=_vectors(1))
    _, report = _load(host, model, None, row)
    assert "a.safetensors: 1 embeddings in the file are left out (hat): to use them in prompts, connect CLIP" in report


def test_a_tokenizer_without_embeddings(host, model, clip, save):
    other = clip()
    other.tokenizer = types.SimpleNamespace()
    patched, report = _load(host, model, other, save("a", hat=_vectors(1)))
    assert "this CLIP reads no embedding:NAME" in report and patched.tokenizer is other.tokenizer


def test_captions_are_encoded_anew_with_other_embeddings(host, model, clip, save):
    """The stored captions of a dataset belong to a CLIP's fingerprint."""
    plain = clip()
    loaded = [
        _load(host, model, plain, save(name, hat=_vectors(seed)))[0] for name, seed in (("a", 1), ("b", 2), ("c", 1))
    ]
    prints = [fingerprint.fingerprint_of(one, "clip").digest for one in (plain, *loaded)]
    assert len(set(prints[:3])) == 3 and prints[1] == prints[3]


def test_a_lookup_of_another_form_is_refused(clip):
    strange = clip()
    for part in (strange.tokenizer.clip_l, strange.tokenizer.clip_g):
        part.__class__ = type("Strange", (type(part),), {"_try_get_embedding": lambda self, text: (None,)})
    with pytest.raises(RuntimeError, match="in a form that Graft does not know"):
        embeddings.with_embeddings(strange, ())
