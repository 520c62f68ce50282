"""What is written into files or hashed keeps its value: digests, names in the cache, drawn batches, kohya's metadata.

The expected values are those of earlier releases: after a change, stored runs and caches are not found again.
"""

import hashlib
import json
import struct

import pytest
import torch
from graft_nodes.storage.safetensors import read_header
from graft_nodes.training.data import encoding, kohya_metadata
from graft_nodes.training.data.batches import draw_items
from graft_nodes.training.data.cache import Cache
from graft_nodes.training.data.dataset import Conditioning
from graft_nodes.training.data.filters import Filters
from graft_nodes.training.data.folder_reader import read_folder
from graft_nodes.training.data.folder_settings import FolderSettings

FILTERS = """
wildcards: true
masks: files
crop: random
crops: 2
resolutions: [96]
trigger: zorp
replacements: {_: ' '}
score_tags: [10, 20]
cache_gb: 1
"""


def _bitmap(path, width, height, seed):
    """A 24 bit BMP, written by hand: the same bytes with every version of Pillow."""
    rows = b""
    for y in range(height):
        row = bytes((seed * 31 + x * 7 + y * 13 + channel * 5) % 256 for x in range(width) for channel in range(3))
        rows += row + bytes(-len(row) % 4)
    head = struct.pack("<2sIHHI", b"BM", 54 + len(rows), 0, 0, 54)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, len(rows), 0, 0, 0, 0) + rows)


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "data"
    for number, (name, size) in enumerate(
        {
            "a.bmp": (64, 64),
            "b.bmp": (96, 48),
            "3_cats/c.bmp": (64, 64),
            "3_cats/d.bmp": (64, 80),
            "dogs/e.bmp": (100, 100),
            "dogs/f.bmp": (64, 64),
        }.items()
    ):
        _bitmap(root / name, *size, number)
    _bitmap(root / "a.mask.bmp", 64, 64, 99)
    texts = {
        "a.txt": "a_cat, {red|blue} sky, __weather__",
        "captions/b.txt": "one line\nanother [trigger] line",
        "3_cats/c.json": json.dumps({"tags": ["solo", "kirin"], "score": 15}),
        "3_cats/d.yaml": "main_prompt: a dog\ntags: [{tag: big, weight: 2}, small]\nloss_scale: 0.5\n",
        "3_cats/local.yaml": "multiply: 1.5\nbatch_id: mine\nflip_p: 0.25\n",
        "dogs/cond_dropout.txt": "0.5",
        "dogs/e.txt": "e, f, g",
        "wildcards/weather.txt": "rain\nsnow",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def _short(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _files_of_entries(cache):
    """Where each entry would lie by itself, as earlier releases wrote it."""
    files = []
    for kind in ("clips", "latents", "texts", "pictures"):
        for path in (cache / kind).rglob("*.safetensors"):
            keys = [path.stem]
            if path.parent.name == "packs":
                keys = json.loads(read_header(str(path))[1]["entries"])
            files += [f"{kind}/{key[:2]}/{key}.safetensors" for key in keys]
    return sorted(files)


def _pixels(pixels):
    return pixels[:, ::8, ::8].movedim(-1, 1)


def _texts(texts):
    return {text: Conditioning(torch.full((1, 1, 1), float(len(text)))) for text in texts}


def test_digests_cache_names_batches_and_metadata(folder, tmp_path):
    def read(filters="", **settings):
        plain = {"resolution": 64, "bucket_step": 16, "validation": 0.2, **settings}
        listing = read_folder(folder, FolderSettings(**plain, filters=Filters.parse(filters)))
        return listing, encoding.encode(listing, _pixels, _texts, ("vae", "clip"), cache, caption_dropout=0.1)[0]

    cache = Cache(tmp_path / "cache")
    (plain, plain_data), (rich, data) = (
        read(),
        read(FILTERS, flip=0.5, shuffle_tags=True, keep_tags=1, tag_dropout=0.25),
    )
    items = [
        (item.image.name, item.crop_number, item.flipped, item.caption)
        for step in range(8)
        for item in draw_items(data, 3, 0.1, 7, step, step, "part 0")
    ]
    files = _files_of_entries(cache.folder)
    metadata = [kohya_metadata.training_metadata(one, 2, 2, 40, 0.1) for one in (plain_data, data)]
    assert {
        "listings": [plain.digest[:16], rich.digest[:16]],
        "datasets": [plain_data.digest[:16], data.digest[:16]],
        "cache": (len(files), _short(files)),
        "batches": _short(items),
        "metadata": _short(metadata),
    } == {
        "listings": ["7e816eb52283ef0f", "fdd5126ef292db9b"],
        "datasets": ["dc6cc847465d5e11", "3ccc0e0bf75e2415"],
        "cache": (17, "fe6a77dd90531ff9"),
        "batches": "2bda94da78d3143a",
        "metadata": "cad028a1393401af",
    }
