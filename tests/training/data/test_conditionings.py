"""Encoded captions: the same bytes whether encoded now, ahead, from disk or in another process's turn; each text
encoded once.
"""

import hashlib
import os

import pytest
import torch
from graft_nodes.training.data import conditionings
from graft_nodes.training.data.cache import Cache
from graft_nodes.training.data.conditionings import Conditionings
from graft_nodes.training.data.dataset import Conditioning


class Encoder:
    """A conditioning from the hash of a text; `calls` are the texts of each call."""

    def __init__(self, extra=None):
        self.calls, self.extra = [], extra or {}

    def __call__(self, texts):
        self.calls.append(list(texts))
        return {text: self.one(text) for text in texts}

    def one(self, text):
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
        context = torch.randn(1, 5, 3, generator=torch.Generator().manual_seed(seed))
        return Conditioning(context, {"pooled_output": context.mean((1,)), "guidance": 3.5, **self.extra})


def _same(left, right):
    return (
        torch.equal(left.context, right.context)
        and left.extras.keys() == right.extras.keys()
        and torch.equal(left.extras["pooled_output"], right.extras["pooled_output"])
        and left.extras["guidance"] == right.extras["guidance"]
    )


def test_captions_that_the_encoder_reads_in_two_ways_are_two_in_the_cache(tmp_path):
    literal, weighted = Encoder(), Encoder()
    cache = Cache(tmp_path)
    Conditionings(weighted, ["", "a (b)"], "e", cache)
    Conditionings(literal, ["", "a (b)"], "e", cache, lambda text: text.replace("(", "\\("))
    assert weighted.calls == [["", "a (b)"]] and literal.calls == [["a (b)"]]


@pytest.mark.parametrize("cached", [False, True])
def test_given_ahead_and_late_are_the_same(tmp_path, cached):
    encoder = Encoder()
    cache = Cache(tmp_path) if cached else None
    texts = Conditionings(encoder, ["", "a"], "e", cache)
    assert encoder.calls == [["", "a"]] and set(texts) == {"", "a"} and len(texts) == 2
    assert (
        texts.prepare(["a", "b", "c", "b"]) == 2
        and encoder.calls[1:] == [["b", "c"]]
        and texts.prepare(["b", "c"]) == 0
    )
    for text in ("", "a", "b", "c", "d", "d"):
        assert _same(texts[text], encoder.one(text))
    assert encoder.calls[2:] == [["d"]] and set(texts) == {"", "a"}


def test_a_second_process_encodes_nothing(tmp_path):
    first, second = Encoder(), Encoder()
    Conditionings(first, ["", "a"], "e", Cache(tmp_path)).prepare(["b"])
    texts = Conditionings(second, ["", "a"], "e", Cache(tmp_path))
    assert (
        texts.prepare(["b"]) == 0
        and all(_same(texts[text], second.one(text)) for text in ("", "a", "b"))
        and not second.calls
    )
    Conditionings(second, [""], "another encoder", Cache(tmp_path))
    assert second.calls == [[""]]


def test_what_json_cannot_hold_is_kept_in_memory(tmp_path):
    encoder = Encoder({"hook": object()})
    texts = Conditionings(encoder, [""], "e", Cache(tmp_path))
    assert (
        texts.prepare(["a"]) == 1 and texts["a"].extras["hook"] is texts["a"].extras["hook"] and len(encoder.calls) == 2
    )
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("cached", [False, True])
def test_memory_is_bounded_where_the_disk_has_it(tmp_path, monkeypatch, cached):
    encoder = Encoder()
    size = 4 * (15 + 3)
    monkeypatch.setattr(conditionings, "RECENT_BYTES", 5 * size)
    texts = Conditionings(encoder, [""], "e", Cache(tmp_path) if cached else None)
    texts.prepare([str(i) for i in range(40)])
    assert len(texts._recent) == (5 if cached else 40)
    assert (
        all(_same(texts[str(i)], encoder.one(str(i))) for i in (*range(40), 0, 3))
        and sum(map(len, encoder.calls)) == 41
    )


def test_the_least_recently_used_conditioning_leaves_memory_first(tmp_path, monkeypatch):
    monkeypatch.setattr(conditionings, "RECENT_BYTES", 3 * 4 * (15 + 3))
    texts = Conditionings(Encoder(), [], "e", Cache(tmp_path))
    held = [texts[text] for text in "abc"]
    assert texts["a"] is held[0]
    assert texts["d"] is texts["d"]
    assert [text for text in "acd" if texts[text] is not texts[text]] == []
    assert texts["a"] is held[0] and texts["c"] is held[2] and texts["b"] is not held[1]


def test_more_than_the_cache_may_hold_is_refused(tmp_path):
    texts = Conditionings(Encoder(), [""], "e", Cache(tmp_path, 10 * 72 / 2**30))
    with pytest.raises(ValueError, match=r"11 wordings of captions are drawn.*raise cache_gb"):
        texts.prepare([str(i) for i in range(11)])
    assert texts.prepare([str(i) for i in range(10)]) == 10


def test_captions_that_are_there_stay_for_the_steps_that_need_them(tmp_path, monkeypatch):
    """All that are needed fit beside one another, but not beside those of a dataset that was used since."""
    monkeypatch.setattr(conditionings, "RECENT_BYTES", 0)
    here, new, others = ([f"{name}{i}" for i in range(4)] for name in "abc")
    Conditionings(Encoder(), [], "e", Cache(tmp_path)).prepare(here)
    for path in tmp_path.rglob("*.safetensors"):
        os.utime(path, (1000, 1000))
    Conditionings(Encoder(), [], "e", Cache(tmp_path)).prepare(others)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    encoder = Encoder()
    texts = Conditionings(encoder, [], "e", Cache(tmp_path, size / 2**30))
    assert texts.prepare(here + new) == 4
    assert all(_same(texts[text], encoder.one(text)) for text in here + new) and encoder.calls == [new]
    full = Conditionings(encoder, [""], "e", Cache(tmp_path, 8 * 72 / 2**30))
    with pytest.raises(ValueError, match="9 wordings of captions are drawn"):
        full.prepare([*here, *new, "d"])


def test_progress_is_heard(tmp_path):
    heard = []
    Conditionings(Encoder(), [""], "e", Cache(tmp_path)).prepare("abc", lambda done, total: heard.append((done, total)))
    assert heard == [(1, 3), (2, 3), (3, 3)]


def test_no_graph_is_built(tmp_path):
    weight = torch.ones(1, requires_grad=True)
    texts = Conditionings(lambda texts: {text: Conditioning(weight * 2) for text in texts}, ["a"])
    assert not texts["a"].context.requires_grad and not texts["b"].context.requires_grad
