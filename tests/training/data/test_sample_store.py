"""Samples beyond what stays in memory are read from the cache when they are drawn: the same batches, whatever their
conditionings hold; and the cache keeps what a dataset reads.
"""

import gc
import os
import shutil

import pytest
import torch
from graft_nodes.training.data import sample_store
from graft_nodes.training.data.batches import make_batches
from graft_nodes.training.data.cache import Cache
from graft_nodes.training.data.combine import combine
from graft_nodes.training.data.dataset import Conditioning, StoredConditioning
from graft_nodes.training.data.folder_settings import SampleSettings
from graft_nodes.training.data.sample_store import SampleStore
from graft_nodes.training.data.samples import Sample, leaves, make_dataset
from graft_nodes.training.data.stored_extras import StoredExtras
from graft_nodes.training.data.stored_latent import StoredLatent
from torch import Tensor

COUNT = 8
SHAPE = (4, 3, 6, 5)
LATENT_BYTES = 4 * 3 * 6 * 5 * 4
CONTEXT_BYTES = 2 * 3 * 4


class Output:
    """As comfy.clip_vision.Output: a plain object with attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def numbers(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def extras(seed):
    """Entries of all the kinds that ComfyUI's nodes make."""
    return {
        "pooled_output": numbers(1, 5, seed=seed),
        "attention_mask": torch.arange(3).reshape(1, 3) + seed,
        "reference_latents": [numbers(1, 4, 2, 3, seed=seed + 1), numbers(1, 4, 3, 2, seed=seed + 2)],
        "clip_vision_output": Output(last_hidden_state=numbers(1, 2, 2, seed=seed), image_sizes=[(3, 4, 5)]),
        "nested": {"a": (numbers(2, seed=seed) > 0, None, "word"), "b": []},
        "guidance": 3.5,
    }


def samples(with_extras=True, count=COUNT):
    for seed in range(count):
        entries = {}
        if with_extras:
            entries = extras(seed)
        conditioning = Conditioning(numbers(1, 2, 3, seed=seed), entries)
        yield Sample(numbers(*SHAPE, seed=seed), conditioning, f"sample {seed}")


def dataset(cache, **given):
    settings = SampleSettings(validation=0.25)
    return make_dataset(samples(**given), settings, Conditioning(torch.zeros(1, 2, 3)), SampleStore(cache))


@pytest.fixture
def keep(monkeypatch):
    """Sets how many bytes stay in memory."""
    return lambda kept: monkeypatch.setattr(sample_store, "KEPT_BYTES", kept)


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def drawn(data):
    return [batch for step in range(12) for batch in make_batches(data, 3, 0.2, 5, step, step, "part 0")]


def contents(batches):
    """Everything that reaches a model."""
    found = []
    for batch in batches:
        conditionings = [{"context": one.context, **one.extras} for one in batch.conditionings]
        found += list(leaves({"latents": batch.latents, "captions": batch.captions, "conditionings": conditionings}))
    return found


def assert_same(left, right):
    assert [path for path, _ in left] == [path for path, _ in right]
    for (path, one), (_, other) in zip(left, right, strict=True):
        assert type(one) is type(other), path
        if isinstance(one, Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other), path
        else:
            assert one == other, path


def test_batches_are_those_of_samples_in_memory(keep, cache):
    whole = dataset(None)
    keep(0)
    stored = dataset(cache)
    for image in stored.images + stored.held_out:
        assert isinstance(image.latent, StoredLatent) and image.latent.shape == SHAPE
        assert isinstance(image.brought.conditioning, StoredConditioning) and isinstance(image.extras, StoredExtras)
    assert stored.digest == whole.digest
    assert [image.name for image in stored.held_out] == [image.name for image in whole.held_out]
    assert_same(contents(drawn(whole)), contents(drawn(stored)))


def test_as_much_stays_in_memory_as_the_limit_says(keep, cache):
    keep(3 * LATENT_BYTES)
    data = dataset(cache, with_extras=False)
    images = data.images + data.held_out
    assert sum(isinstance(image.latent, Tensor) for image in images) == 3
    assert all(isinstance(image.brought.conditioning, Conditioning) for image in images)
    keep(2 * CONTEXT_BYTES)
    data = dataset(cache, with_extras=False)
    images = data.images + data.held_out
    assert all(isinstance(image.latent, StoredLatent) for image in images)
    assert sum(isinstance(image.brought.conditioning, Conditioning) for image in images) == 2


def test_the_limit_holds_for_all_of_a_chain(keep, cache):
    """Samples that come in parts through more images: the first ones stay in memory, and no more than for one part."""
    keep(3 * LATENT_BYTES)
    whole, made = None, list(samples(with_extras=False, count=8))
    for number in range(4):
        store = SampleStore(cache, beside=whole)
        part = make_dataset(made[2 * number : 2 * number + 2], SampleSettings(validation=0.0), store=store)
        whole = part if whole is None else combine([part, whole])
    assert sum(isinstance(image.latent, Tensor) for image in whole.images) == 3 and len(whole.images) == 8
    keep(5 * CONTEXT_BYTES)
    store = SampleStore(cache, beside=whole)
    part = make_dataset(made[:4], SampleSettings(validation=0.0), store=store)
    assert all(isinstance(image.brought.conditioning, StoredConditioning) for image in part.images)


def test_only_what_is_in_the_cache_is_left_on_disk(keep, cache):
    for limit, on_disk in ((10**9, False), (0, True)):
        keep(limit)
        store = SampleStore(cache)
        make_dataset(samples(), SampleSettings(validation=0.0), Conditioning(torch.zeros(1, 2, 3)), store)
        assert store.leaves_on_disk == on_disk


def test_nothing_of_what_is_stored_stays_in_memory(keep, cache):
    keep(0)
    before = {id(one) for one in gc.get_objects() if type(one) is Tensor}
    data = dataset(cache)
    gc.collect()
    left = [one for one in gc.get_objects() if type(one) is Tensor and id(one) not in before]
    assert sum(one.numel() for one in left) == 6 and len(data.images) == 6  # the empty conditioning


def test_samples_of_one_conditioning_have_one_file_and_one_object(keep, cache):
    keep(0)
    shared = Conditioning(numbers(1, 2, 3, seed=1), {"reference_latents": [numbers(1, 4, 2, 3, seed=2)]})
    given = [Sample(torch.full(SHAPE, float(number)), shared) for number in range(3)]
    images = make_dataset(given, SampleSettings(validation=0.0), None, SampleStore(cache)).images
    assert len({id(image.brought) for image in images}) == len({id(image.extras) for image in images}) == 1
    assert cache.write_counts == {"samples": 3 + 2}


def test_a_second_dataset_of_the_same_samples_writes_nothing(keep, cache, tmp_path):
    keep(0)
    first = contents(drawn(dataset(cache)))
    again = Cache(tmp_path / "cache")
    assert_same(first, contents(drawn(dataset(again))))
    assert not again.write_counts


def test_files_stay_as_long_as_the_dataset_is_there(keep, tmp_path):
    keep(0)
    small = Cache(tmp_path / "cache", limit_gb=0.0)
    data = dataset(small)
    expected = contents(drawn(data))
    other = Cache(tmp_path / "cache", limit_gb=0.0)  # as of another Dataset node
    other.write("latents", "00", {"latent": torch.ones(3)})
    Cache(tmp_path / "cache", limit_gb=0.0).trim()
    assert_same(expected, contents(drawn(data)))
    assert not (tmp_path / "cache" / "latents" / "00" / "00.safetensors").exists()
    del data
    gc.collect()
    assert Cache(tmp_path / "cache", limit_gb=0.0).trim() == 0


def test_a_sample_that_is_gone_or_damaged_is_refused_by_name(keep, cache, tmp_path):
    keep(0)
    data = dataset(cache)
    before = {path: path.read_bytes() for path in (tmp_path / "cache").rglob("*.safetensors")}
    for path, content in before.items():
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"Samples: sample \d is not in the cache any more: .*safetensors was removed"):
        drawn(data)
    assert drawn(dataset(Cache(tmp_path / "cache")))  # a new dataset writes them again
    assert {path: path.read_bytes() for path in before} == before
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(ValueError, match="change an input of Samples, and run the workflow"):
        drawn(data)


def test_what_cannot_be_written_stays_in_memory(keep, tmp_path):
    keep(0)
    (tmp_path / "cache").write_text("a file where the folder would be")
    cache = Cache(tmp_path / "cache")
    store = SampleStore(cache)
    data = make_dataset(samples(), SampleSettings(validation=0.0), None, store)
    assert all(isinstance(image.latent, Tensor) and isinstance(image.extras, dict) for image in data.images)
    assert store.report()[-1].startswith("cache: cannot be written, what was made is kept in memory only")


def test_the_report_counts_what_is_in_memory_and_what_is_read(keep, cache):
    """Two latents of 4 x 256 x 256 numbers of 4 bytes are 2 MB, two conditionings of 512 x 256 numbers 1 MB."""
    given = [Sample(torch.full((4, 256, 256), float(n)), Conditioning(numbers(1, 512, 256, seed=n))) for n in range(2)]
    store = SampleStore(cache)
    make_dataset(given, SampleSettings(validation=0.0), None, store)
    line = "3.0 MB of latents and conditionings, as the graph holds them: nothing is copied"
    assert store.report() == [line]
    assert not os.path.exists(cache.folder)
    keep(2**20)
    store = SampleStore(cache)
    make_dataset(given, SampleSettings(validation=0.0), None, store)
    lines = store.report()
    assert lines[0] == line.replace("3.0", "2.0")
    assert lines[1] == "1.0 MB more are read from the cache when they are drawn"
    assert lines[2].startswith("cache: 0.00 GB of at most 20 GB in ")
