"""Datasets of before keep their digests and the order of their batches: both were recorded with version 0.1.0's code,
before datasets could have several folders.

The pictures are BMP files written byte by byte, so that no encoder's version changes their hashes.
"""

import hashlib

import pytest
import torch
from graft_nodes.training.data import encoding
from graft_nodes.training.data.batches import draw_items
from graft_nodes.training.data.dataset import Conditioning
from graft_nodes.training.data.epoch_order import batches_per_epoch
from graft_nodes.training.data.filters import Filters
from graft_nodes.training.data.folder_reader import read_folder
from graft_nodes.training.data.folder_settings import FolderSettings

IMAGES = {
    "10_sks dog/a": (64, 64),
    "10_sks dog/b": (96, 48),
    "c": (48, 96),
    "d": (200, 40),
    "in/e": (64, 64),
    "in/f": (33, 77),
}
VARIED = {"flip": 0.5, "shuffle_tags": True, "keep_tags": 1, "repeats": 3}


def _bitmap(width, height, seed):
    """A BMP file of 24 bits a pixel with equal rows."""
    row = bytes((seed * 37 + i * 11) % 256 for i in range(width * 3))
    row += bytes(-len(row) % 4)
    sizes = [54 + len(row) * height, 0, 54, 40, width, height]
    head = b"BM" + b"".join(number.to_bytes(4, "little") for number in sizes)
    return head + (1).to_bytes(2, "little") + (24).to_bytes(2, "little") + bytes(24) + row * height


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("old")
    for number, (name, size) in enumerate(IMAGES.items()):
        path = root / f"{name}.bmp"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(_bitmap(*size, number))
        path.with_suffix(".txt").write_text(f"sks dog, tag {number}, more", encoding="utf-8")
    return root


def _dataset(folder, filters="", **given):
    fields = {name: given.pop(name) for name in ("regularization", "regularization_share") if name in given}
    settings = {"resolution": 64, "bucket_step": 16, "validation": 0.25, **given}
    listing = read_folder(folder, FolderSettings(**settings, filters=Filters.parse(filters)))
    fields = {"unhashed": (), "regularization_share": 0.0, "weighted_captions": False, **fields}
    dataset, _ = encoding.encode(
        listing,
        lambda pixels: pixels.movedim(-1, 1)[:, :, ::8, ::8],
        lambda texts: {text: Conditioning(torch.zeros(1, 1, 1)) for text in texts},
        ("v", "c"),
        caption_dropout=0.1,
        **fields,
    )
    return listing, dataset


def _order(dataset, batch_size):
    """(digest of what 60 steps show, batches in an epoch)."""
    digest = hashlib.sha256()
    for number in range(60):
        for item in draw_items(dataset, batch_size, 0.1, 7, number, number, "part 0"):
            shown = (item.image.name, item.crop_number, item.flipped, item.caption, item.is_regularization)
            digest.update(repr(shown).encode())
    return digest.hexdigest()[:16], batches_per_epoch(dataset, batch_size)


def test_a_plain_folder(folder):
    listing, dataset = _dataset(folder)
    assert listing.digest == "7cce4cf10c1c4a1f360ac54a730bcfa01b22d29269f65550253058a681283bff"
    assert dataset.digest == "bdc30be50ddaa87c3c46080b97aec170ffa5e9b7329868894cf5d776f1bfc9f1"
    assert [_order(dataset, size) for size in (1, 2, 4)] == [
        ("829b56937f76ca0c", 13),
        ("43753f748fb05ede", 8),
        ("38ab6b5d9233b36c", 6),
    ]


def test_a_folder_at_two_resolutions_with_crops_and_captions_that_vary(folder):
    listing, dataset = _dataset(folder, "resolutions: [96]\ncrop: random", **VARIED)
    assert listing.digest == "923046429f3161d1fbf9a47bddeda54e34f7b0fa4d32654fb9e8c9d49e7cc0e0"
    assert dataset.digest == "0b4f635dc9250211d7dfee04106ad76e1ef04183871526c4ac29686bb8d373bc"
    assert [_order(dataset, size) for size in (1, 2, 4)] == [
        ("fbc9697b043b6363", 78),
        ("435dee14097a3c13", 42),
        ("68c76941a1dbc076", 22),
    ]


def test_a_folder_with_regularization(folder):
    dataset = _dataset(folder, regularization=_dataset(folder)[1], regularization_share=0.25)[1]
    assert dataset.digest == "6d22b55dfbf6124749570a117e1fec7e16f9ff9a88f89ad2d9f9233a03f3fc6d"
    assert [_order(dataset, size) for size in (1, 2, 4)] == [
        ("b0f75ba2c9f39e1b", 18),
        ("33c9e111f80636df", 13),
        ("a4b0b8a65bae0f1d", 7),
    ]
