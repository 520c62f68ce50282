"""Dataset folders with damage: pictures, captions, masks, LunNova's JSON, EveryDream2's YAML, and the YAML of
`filters`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from graft_nodes.training.data import folder_report
from graft_nodes.training.data.cache import Cache
from graft_nodes.training.data.dataset import Conditioning
from graft_nodes.training.data.encoding import encode
from graft_nodes.training.data.folder_reader import read_folder
from graft_nodes.training.data.folder_settings import FolderSettings
from graft_nodes.training.data.layouts import registry
from hypothesis import strategies as st

from .damage import CORPUS, damaged_bytes, damaged_json, text_of
from .engine import Target

PICTURES = (
    "a.png",
    "b.jpg",
    "sub/c.webp",
    "10_x/d.gif",
    "e.bmp",
    "f.avif",
    "a.PNG",
    "\u00e9.jpeg",
    "2_y/3_z/g.png",
    ".hidden/h.png",
)
MASKS = ("masks/a.png", "a.mask.png", "b.mask.jpg", "sub/masks/c.png")
TEXTS = (
    "a.txt",
    "b.caption",
    "captions/a.txt",
    "sub/c.txt",
    "multiply.txt",
    "sub/flip_p.txt",
    "cond_dropout.txt",
    "shuffle_tags.txt",
)
JSONS = ("a.json", "b.json", "metadata/x.json", "sub/c.json")
LISTS = ("wildcards/a.txt", "wildcards/b.txt", "wildcards/c/d.txt")
YAMLS = ("a.yaml", "local.yaml", "global.yaml", "sub/local.yml", "sub/c.yaml", "10_x/d.yml")


class Datasets(Target):
    """See above."""

    name = "datasets"

    def cases(self) -> st.SearchStrategy[Any]:
        """({file: bytes}, settings)."""
        texts = [path.read_bytes() for path in sorted((CORPUS / "texts").iterdir())]
        of = {
            kind: [path.read_bytes() for path in sorted((CORPUS / "texts").glob(f"*.{kind}"))]
            for kind in ("txt", "json", "yaml")
        }
        drawn = [path.read_bytes() for path in sorted((CORPUS / "pictures").iterdir())]
        json_text = damaged_json(of["json"], 3).map(text_of)
        bodies = {
            PICTURES: damaged_bytes(drawn, 4),
            MASKS: damaged_bytes(drawn, 2),
            TEXTS: damaged_bytes(of["txt"], 4),
            LISTS: damaged_bytes(
                [b"__b__ __b__ __b__\n__c/d__\n", b"__c/d__ x\n# y\n", b"{a|b|{c}}\n__a__\n", b"one\ntwo\n"], 3
            ),
            JSONS: st.one_of(json_text, damaged_bytes(of["json"], 3)),
            YAMLS: st.one_of(damaged_bytes(of["yaml"], 3), json_text),
        }
        files = [st.tuples(st.sampled_from(names), body) for names, body in bodies.items()]
        odd = st.one_of(
            st.just(""),
            st.just("wildcards: true"),
            damaged_bytes([text for text in texts if b":" in text], 3).map(_text),
        )
        settings = st.fixed_dictionaries(
            {
                "captions": st.sampled_from(("auto", "auto", "auto", *registry.options())),
                "repeats": st.sampled_from((1, 1, 1, 2, 0)),
                "flip": st.sampled_from((0.0, 0.5, 1.0)),
                "shuffle_tags": st.booleans(),
                "keep_tags": st.sampled_from((0, 0, 0, 1)),
                "tag_dropout": st.sampled_from((0.0, 0.5)),
                "validation": st.sampled_from((0.0, 0.1, 0.9)),
                "buckets": st.booleans(),
                "bucket_step": st.sampled_from((8, 64)),
            }
        )
        return st.tuples(
            st.lists(st.one_of(files[0], files[0], *files), min_size=1, max_size=5), settings, odd, st.booleans()
        )

    def attempt(self, case: Any) -> None:
        """As GraftDataset reads a folder."""
        files, plain, filters, cached = case
        folder = self.place / "folder"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, body in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(body)
        settings = FolderSettings(filters=filters, resolution=64, **plain)
        cache = Cache(self.place / "cache", 0.001) if cached else None
        listing = read_folder(Path(folder), settings, cache)
        dataset, sheet = encode(listing, encode_pixels, encode_texts, ("eye", "ear"), cache)
        folder_report.report(listing, None, 0.0)
        folder_report.editor_data(listing, "")
        assert len(dataset.images) == len(listing.train) and sheet.ndim == 4
        assert all(bool(torch.isfinite(picture.latent).all()) for picture in dataset.images)
        if cache is not None:
            cache.trim()


def _text(body: bytes) -> str:
    return body.decode("utf-8", "replace")


def encode_pixels(pixels: torch.Tensor) -> torch.Tensor:
    assert float(pixels.min()) >= 0.0 and float(pixels.max()) <= 1.0
    return pixels[:, ::8, ::8].movedim(-1, 1)


def encode_texts(texts: Any) -> dict[str, Conditioning]:
    return {text: Conditioning(torch.full((1, 1, 1), float(len(text)))) for text in texts}
