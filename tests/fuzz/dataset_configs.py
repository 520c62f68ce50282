"""kohya's dataset_config.toml and its metadata JSON with damage, over folders that are whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from graft_nodes.training.data import folder_report
from graft_nodes.training.data.combine import combine
from graft_nodes.training.data.dataset_config import paths_in, read_config
from graft_nodes.training.data.encoding import encode
from graft_nodes.training.data.folder_reader import read_folder
from graft_nodes.training.data.folder_settings import FolderSettings, FolderSource
from hypothesis import strategies as st

from .damage import CORPUS, DEEP, HUGE, damaged_bytes, damaged_json, text_of
from .datasets import encode_pixels, encode_texts
from .engine import Target

FOLDERS = {"cats": 3, "sets/plants": 2, "sets/2_stones": 2}


def toml_of(tree: Any) -> bytes:
    """A JSON tree as TOML of inline tables, with what no writer writes: deep nesting and huge numbers."""
    lines = [f"{json.dumps(key)} = {_value(value)}" for key, value in _tables(tree).items()]
    text = "\n".join(lines)
    text = text.replace(f'"{DEEP}"', "[" * 3000 + "]" * 3000).replace(f'"{HUGE}"', "9" * 5000)
    return text.encode("utf-8", "surrogatepass")


def _tables(tree: Any) -> Mapping[str, Any]:
    if isinstance(tree, dict):
        return tree
    return {"datasets": tree}


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if value is None:
        return "1979-05-27"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)


class DatasetConfigs(Target):
    """See above."""

    name = "configs"

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.root = place / "input"
        pictures = sorted((CORPUS / "pictures").glob("*.png"))
        for name, count in FOLDERS.items():
            (self.root / name).mkdir(parents=True)
            for number in range(count):
                shutil.copy(pictures[number % len(pictures)], self.root / name / f"{number}.png")
                (self.root / name / f"{number}.txt").write_text(f"a, b{number}, c", encoding="utf-8")

    def cases(self) -> st.SearchStrategy[Any]:
        """(the TOML file, the metadata JSON, the node's settings)."""
        texts = [path.read_bytes() for path in sorted((CORPUS / "configs").glob("*.toml"))]
        trees = [path.read_bytes() for path in sorted((CORPUS / "configs").glob("*.json"))]
        metadata = [path.read_bytes() for path in sorted((CORPUS / "metadata").iterdir())]
        settings = st.fixed_dictionaries(
            {
                "buckets": st.sampled_from((True, True, False)),
                "shuffle_tags": st.booleans(),
                "validation": st.sampled_from((0.0, 0.1)),
            }
        )
        config = st.one_of(damaged_json(trees, 3).map(toml_of), damaged_bytes(texts, 3))
        return st.tuples(
            config, st.one_of(damaged_json(metadata, 2).map(text_of), damaged_bytes(metadata, 2)), settings
        )

    def attempt(self, case: Any) -> None:
        """As GraftDataset reads the folders that the file names."""
        config, metadata, plain = case
        file = self.root / "dataset_config.toml"
        file.write_bytes(config)
        (self.root / "sets/plants.json").write_bytes(metadata)
        base = FolderSource(self.root, FolderSettings(filters="", resolution=64, bucket_step=8, **plain))
        assert all(path.is_relative_to(self.root.resolve()) for path in paths_in(file, self.root))
        sources, _ = read_config(file, self.root, base)
        datasets = []
        for source in sources:
            listing = read_folder(source.folder, source.settings, None)
            dataset, _ = encode(listing, encode_pixels, encode_texts, ("eye", "ear"), None)
            folder_report.report(listing, None, 0.0)
            assert all(bool(torch.isfinite(image.latent).all()) for image in dataset.images)
            datasets.append(dataset)
        combine(datasets)
