"""Latents and conditionings beyond what a dataset keeps in memory are read when they are drawn: the same batches, and
what is gone from the cache is made again.
"""

import shutil

import numpy as np
import pytest
import torch
from graft_nodes.training.data import conditionings, encoding, folder_report
from graft_nodes.training.data.batches import make_batches
from graft_nodes.training.data.cache import Cache
from graft_nodes.training.data.dataset import Conditioning
from graft_nodes.training.data.folder_reader import read_folder
from graft_nodes.training.data.folder_settings import FolderSettings
from graft_nodes.training.data.stored_latent import StoredLatent
from PIL import Image

IMAGES = 12
LATENT_BYTES = 3 * 8 * 8 * 4


def _pixels(pixels):
    return pixels[:, ::8, ::8].movedim(-1, 1).contiguous()


def _texts(texts):
    return {text: Conditioning(torch.full((1, 4, 16), float(sum(text.encode())))) for text in texts}


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    for number in range(IMAGES):
        pixels = np.random.default_rng(number).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"{number:02}.png")
        (root / f"{number:02}.txt").write_text(f"picture {number}", encoding="utf-8")
    return root


@pytest.fixture
def read(folder, tmp_path, monkeypatch):
    """Reads the folder into a dataset that keeps that many bytes in memory."""

    def read(kept, cached=True):
        monkeypatch.setattr(encoding, "KEPT_BYTES", kept)
        monkeypatch.setattr(conditionings, "KEPT_BYTES", kept)
        listing = read_folder(folder, FolderSettings(resolution=64, bucket_step=16, validation=0.25, flip=0.5))
        cache = None
        if cached:
            cache = Cache(tmp_path / "cache")
        return encoding.encode(listing, _pixels, _texts, ("vae", "clip"), cache)[0]

    return read


def _latents(dataset):
    return [one for image in dataset.images + dataset.held_out for one in (image.latent, image.flipped_latent)]


def _batches(dataset):
    return [batch for step in range(20) for batch in make_batches(dataset, 3, 0.2, 5, step, step, "part 0")]


def _same(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.captions == other.captions and torch.equal(one.latents, other.latents)
        for mine, theirs in zip(one.conditionings, other.conditionings, strict=True):
            assert torch.equal(mine.context, theirs.context)


def test_batches_are_those_of_a_dataset_in_memory(read):
    whole, part = read(2**30), read(3 * LATENT_BYTES)
    assert StoredLatent not in map(type, _latents(whole))
    assert {type(latent) for latent in _latents(part)} == {StoredLatent}
    assert sum(latent.keeps for latent in _latents(part)) == 3
    assert whole.digest == part.digest
    assert [latent.shape for latent in _latents(whole)] == [latent.shape for latent in _latents(part)]
    _same(_batches(whole), _batches(part))


def test_all_texts_are_there_and_those_beyond_the_limit_are_not_in_memory(read):
    whole, part = read(2**30).conditionings, read(LATENT_BYTES).conditionings
    assert list(whole) == list(part) and len(part) == IMAGES + 1
    assert len(whole._fixed) == IMAGES + 1 and not part._fixed
    for text in whole:
        assert torch.equal(whole[text].context, part[text].context)
    assert len(part._fixed) == LATENT_BYTES // (4 * 16 * 4)


def test_what_is_gone_from_the_cache_is_encoded_again(read, tmp_path):
    whole, part = read(2**30), read(0)
    expected = _batches(whole)
    shutil.rmtree(tmp_path / "cache")
    _same(expected, _batches(part))
    assert list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_picture_that_changed_and_is_gone_from_the_cache_is_refused(read, folder, tmp_path):
    part = read(0)
    shutil.rmtree(tmp_path / "cache")
    for path in folder.glob("*.png"):
        path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(ValueError, match=r"Dataset: .*\.png changed while the folder was read"):
        _batches(part)


def test_opened_again_each_latent_and_each_text_is_read_once(read, monkeypatch):
    read(2**30)
    data, asked = read(2**30), []
    reading = Cache.read
    monkeypatch.setattr(Cache, "read", lambda cache, kind, key: asked.append((kind, key)) or reading(cache, kind, key))
    first, count = _batches(data), len(asked)
    assert len(set(asked)) == count and {kind for kind, _ in asked} == {"latents", "texts"}
    _same(first, _batches(data))
    assert len(asked) == count


def test_without_a_cache_all_is_in_memory(read):
    data = read(0, cached=False)
    assert StoredLatent not in map(type, _latents(data))
    assert len(data.conditionings._fixed) == IMAGES + 1


def test_the_report_counts_what_is_in_memory(read):
    megabytes = 2 * IMAGES * LATENT_BYTES / 2**20
    assert folder_report.memory(read(2**30)) == f"{megabytes:.1f} MB of latents and masks in memory"
    stored = (
        f"0.0 MB of latents and masks in memory; {megabytes:.1f} MB more are read from the cache when they are drawn"
    )
    assert folder_report.memory(read(0)) == stored
