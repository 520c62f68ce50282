"""The registry of dataset layouts: every record is complete and reads an example folder of its own; what lists layouts
reads the registry; a new one is one file.
"""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from graft_nodes.training.data.changed_files import stamp_files
from graft_nodes.training.data.filters import Filters
from graft_nodes.training.data.folder_reader import read_folder
from graft_nodes.training.data.folder_settings import FolderSettings
from graft_nodes.training.data.layouts import registry
from graft_nodes.training.data.layouts.layout import CaptionReader
from PIL import Image

from .csv_layout import LAYOUT as CSV

HELP = Path(__file__).parents[4] / "web" / "docs" / "GraftDataset.md"

# Per layout, in the registry's order: the text files of its example, the captions and the repeats of its images.
EXAMPLES = {
    "txt": (
        {"1.txt": "a red ball", "3_cats/2.caption": "a cat"},
        {"1.png": ("a red ball", 1), "3_cats/2.png": ("a cat", 3)},
    ),
    "folder": (
        {"captions/1.txt": "a red ball", "captions/deep/2.txt": "a cat"},
        {"1.png": ("a red ball", 1), "deep/2.png": ("a cat", 1)},
    ),
    "json": (
        {
            "metadata/1.json": json.dumps({"tags": ["red", "ball"], "score": 55, "path": "images/1.png"}),
            "images/2.json": json.dumps({"tags": "cat, gray"}),
        },
        {"images/1.png": ("red, ball", 1), "images/2.png": ("cat, gray", 1)},
    ),
    "yaml": (
        {
            "1.yaml": "main_prompt: a red ball\ntags: [shiny]",
            "in/local.yaml": "multiply: 1.5",
            "in/2.yml": "caption: cat",
        },
        {"1.png": ("a red ball, shiny", 1), "in/2.png": ("cat", 1.5)},
    ),
    "metadata": (
        {"meta_cap.json": json.dumps({"1": {"caption": "a red ball"}, "in/2.png": {"caption": "cat", "tags": "gray"}})},
        {"1.png": ("a red ball", 1), "in/2.png": ("cat, gray", 1)},
    ),
}
LAYOUTS = {layout.name: layout for layout in registry.LAYOUTS}


def _write(root, texts, images):
    for number, name in enumerate(images):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(root / name)
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def _read(root, captions, filters=""):
    plain = {"resolution": 64, "bucket_step": 16, "validation": 0.0}
    return read_folder(root, FolderSettings(**plain, captions=captions, filters=Filters.parse(filters)))


def _captions(listing):
    return {entry.name: (entry.caption.plain, entry.repeats) for entry in listing.train}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_field_of_a_record_is_filled_in(name):
    layout = LAYOUTS[name]
    optional = {"has_scores", "unlisted_reason", "fallback_note", "settings_files", "open_settings"}
    for field in fields(layout):
        assert field.name in optional or getattr(layout, field.name), field.name
    assert re.fullmatch(r"[a-z0-9_]+", layout.name) and all(suffix.startswith(".") for suffix in layout.suffixes)
    assert layout.documentation.endswith(".") and not layout.hint.endswith(".")
    assert bool(layout.settings_files) == bool(layout.open_settings)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("captions", ["its own", registry.AUTO])
def test_every_layout_reads_a_folder_of_its_own(tmp_path, name, captions):
    texts, expected = EXAMPLES[name]
    listing = _read(_write(tmp_path, texts, expected), name if captions == "its own" else captions)
    assert _captions(listing) == expected and not listing.problems and all(e.captioned for e in listing.train)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_recognizes_its_own_folder_alone(tmp_path, name):
    texts, expected = EXAMPLES[name]
    _write(tmp_path, texts, expected)
    assert [layout.name for layout in registry.LAYOUTS if layout.recognize(tmp_path)] == [name]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_read_as_another_layout_names_the_right_one(tmp_path, name):
    texts, expected = EXAMPLES[name]
    _write(tmp_path, texts, expected)
    other = "folder" if name != "folder" else "txt"
    (note,) = [line for line in _read(tmp_path, other).notes if line.startswith("no caption was found")]
    assert (
        f"caption source {other}" in note
        and LAYOUTS[name].title in note
        and f"set caption source to {name} or auto" in note
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_its_files_are_watched_while_training(tmp_path, name):
    texts, expected = EXAMPLES[name]
    assert set(texts) <= stamp_files(_write(tmp_path, texts, expected)).keys()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_help_page_has_its_documentation(name):
    layout, page = LAYOUTS[name], " ".join(HELP.read_text(encoding="utf-8").split())
    assert f"- `{name}`: {layout.documentation}" in page
    for file, keys in layout.settings_files.items():
        assert file in page, file
        for key in keys:
            assert key in page, (file, key)


def test_every_key_of_the_settings_files_is_read(tmp_path):
    values = {
        "caption": "x",
        "main_prompt": "x",
        "tags": "[x]",
        "shuffle_tags": "true",
        "max_caption_length": "9",
    }
    _write(tmp_path, {}, ["1.png"])
    for file, keys in LAYOUTS["yaml"].settings_files.items():
        for key in keys:
            path = tmp_path / file.replace("name", "1")
            value = values.get(key, "0.5")
            path.write_text(value if file.endswith(".txt") else f"{key}: {value}", encoding="utf-8")
            assert not _read(tmp_path, "yaml").problems, (file, key)
            path.unlink()


@pytest.mark.parametrize("key", Filters.keys())
def test_every_key_of_filters_is_documented_and_refuses_what_it_cannot_be(key):
    record, page = Filters.keys()[key], HELP.read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    assert record.documentation.endswith(".") and any(key in re.findall(r"\w+", row) for row in rows)
    with pytest.raises(ValueError):
        record.read({"no": {"such": "value"}})


def test_options_and_errors_list_what_is_registered():
    options = ["auto", *EXAMPLES]
    assert registry.options() == options
    with pytest.raises(ValueError, match=f"caption source is 'csv', expected one of {', '.join(options)}"):
        FolderSettings(captions="csv")
    with registry.LAYOUTS.registered(CSV):
        assert registry.options()[-1] == "csv" and ".csv" in registry.suffixes()
        assert "csv: captions.csv with file, caption and repeats." in registry.tooltip()
        assert FolderSettings(captions="csv").captions == "csv"
        with pytest.raises(
            ValueError, match=r"need scores from JSON files; caption source csv reads none, auto and json do"
        ):
            FolderSettings(captions="csv", filters=Filters.parse("min_score: 3"))
        with pytest.raises(ValueError, match="caption source csv is already registered"):
            registry.LAYOUTS.register(CSV)
    assert "csv" not in registry.options()
    with pytest.raises(ValueError, match="caption source auto: already registered: option auto"):
        registry.LAYOUTS.register(replace(CSV, name="auto"))


def test_a_new_layout_is_read_chosen_or_with_auto(tmp_path):
    texts = {"captions.csv": "file,caption,repeats\n1.png,a red ball,2\nnowhere.png,x,1\n", "2.txt": "a cat"}
    _write(tmp_path, texts, ["1.png", "2.png"])
    with registry.LAYOUTS.registered(CSV):
        listing = _read(tmp_path, "csv")
        assert _captions(listing) == {"1.png": ("a red ball", 2)}
        assert listing.problems == ("captions.csv: line 3 names 'nowhere.png', which is not a file; correct its name",)
        assert "1 left out that captions.csv does not list" in listing.notes
        assert _captions(_read(tmp_path, "auto")) == {"1.png": ("a red ball", 2), "2.png": ("a cat", 1)}
        assert "captions.csv" in stamp_files(tmp_path)
    assert _captions(_read(tmp_path, "auto")) == {"1.png": ("", 1), "2.png": ("a cat", 1)}


def test_a_layout_may_have_repeats_masks_and_a_fallback_of_its_own(tmp_path):
    class Names(CaptionReader):
        def fallback(self, image):
            from graft_nodes.training.data.captions import WrittenCaption

            return WrittenCaption(lines=(f"a {image.stem}",), found=True)

    _write(tmp_path, {}, ["9_x/cat.png"])
    Image.new("L", (64, 64), 255).save(tmp_path / "mask of cat.png")
    layout = replace(
        CSV,
        name="names",
        open=lambda folder, filters, chosen: Names(),
        unlisted_reason="",
        fallback_note="captions are file names",
        repeats=lambda image, folder: 5,
        mask_file=lambda image, folder: folder / "mask of cat.png",
    )
    with registry.LAYOUTS.registered(layout):
        listing = _read(tmp_path, "names")
    found = {entry.name: (entry.caption.plain, entry.repeats, entry.mask) for entry in listing.train}
    assert found["9_x/cat.png"] == ("a cat", 5, "mask of cat.png") and "2 captions are file names" in listing.notes
