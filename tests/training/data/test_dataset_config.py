"""kohya's dataset_config.toml: which settings each folder gets, what is refused with its place, and that no path leaves
the input folder.
"""

import json
import re

import numpy as np
import pytest
from graft_nodes.training.data.control_methods import ControlSize
from graft_nodes.training.data.dataset_config import paths_in, read_config
from graft_nodes.training.data.filters import Filters
from graft_nodes.training.data.folder_reader import read_folder
from graft_nodes.training.data.folder_settings import FolderSettings, FolderSource
from graft_nodes.training.data.kohya_metadata import folder_metadata
from graft_nodes.training.data.musubi_jsonl import read_jsonl
from PIL import Image

from .making_clips import write_clip

EXAMPLE = r"""
[general]
shuffle_caption = true
caption_extension = '.txt'
keep_tokens = 1
caption_prefix = "masterpiece, "

[[datasets]]
resolution = 512
batch_size = 4
keep_tokens = 2

  [[datasets.subsets]]
  image_dir = 'hoge'
  class_tokens = 'hoge girl'

  [[datasets.subsets]]
  image_dir = 'sets\fuga'
  class_tokens = 'fuga boy'
  keep_tokens = 3
  num_repeats = 10
  flip_aug = true
  caption_dropout_rate = 0.1

  [[datasets.subsets]]
  is_reg = true
  image_dir = 'reg'
  class_tokens = 'human'
  keep_tokens = 1

[[datasets]]
resolution = [768, 768]
batch_size = 2
enable_bucket = true
min_bucket_reso = 256
max_bucket_reso = 1536

  [[datasets.subsets]]
  image_dir = 'piyo'
  metadata_file = 'piyo/piyo_md.json'
"""


@pytest.fixture
def root(tmp_path):
    """ComfyUI's input folder, with the folders of kohya's own example beside the file."""
    (tmp_path / "input" / "sets").mkdir(parents=True)
    for number, name in enumerate(("hoge", "sets/fuga", "reg", "piyo")):
        folder = tmp_path / "input" / "sets" / name
        folder.mkdir(parents=True)
        for image in range(3):
            noise = np.random.default_rng(10 * number + image).integers(0, 255, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(noise).save(folder / f"{image}.png")
    (tmp_path / "input" / "sets" / "hoge" / "1.txt").write_text("hoge girl, sitting, red", encoding="utf-8")
    (tmp_path / "input" / "sets" / "piyo" / "piyo_md.json").write_text('{"0": {"caption": "piyo"}}', encoding="utf-8")
    return tmp_path / "input"


def _read(root, text, **base):
    file = root / "sets" / "dataset_config.toml"
    file.write_text(text, encoding="utf-8")
    return read_config(file, root, FolderSource(root, FolderSettings(caption_dropout=0.05, batch_size=7, **base)))


def _one(keys="", general="", dataset=""):
    return f"[general]\n{general}\n[[datasets]]\n{dataset}\n[[datasets.subsets]]\nimage_dir = 'hoge'\n{keys}\n"


def test_kohyas_own_example(root):
    sources, notes = _read(root, EXAMPLE, resolution=1024, tag_dropout=0.2)
    hoge, *_, piyo = sources
    assert [source.folder.relative_to(root / "sets").as_posix() for source in sources] == [
        "hoge",
        "sets/fuga",
        "reg",
        "piyo",
    ]
    assert [source.settings.resolution for source in sources] == [512, 512, 512, 768]
    assert [source.settings.keep_tags for source in sources] == [2, 3, 1, 1]
    assert [source.settings.batch_size for source in sources] == [
        4,
        4,
        0,
        2,
    ]  # regularization has its share of the others'
    assert [source.settings.repeats for source in sources] == [1, 10, 1, 1]
    assert [source.settings.flip for source in sources] == [0.0, 0.5, 0.0, 0.0]
    assert [source.settings.caption_dropout for source in sources] == [0.05, 0.1, 0.05, 0.05]  # the node's as well
    assert [source.is_regularization for source in sources] == [False, False, True, False]
    assert all(source.settings.shuffle_tags and source.settings.tag_dropout == 0.2 for source in sources)
    assert all(source.settings.filters.caption_prefix == "masterpiece, " for source in sources)
    assert (piyo.settings.min_side, piyo.settings.max_side, hoge.settings.max_side) == (256, 1536, 0)
    assert notes == ["is_reg: regularization share of the node says how many of each batch these images are"]


def test_the_words_of_a_subset_are_the_captions_of_images_without_one(root):
    (root / "sets" / "hoge" / "2.caption").write_text("not this one", encoding="utf-8")
    (root / "sets" / "hoge" / "10_below").mkdir()
    Image.new("RGB", (64, 64)).save(root / "sets" / "hoge" / "10_below" / "x.png")
    (source,), _ = _read(
        root, _one("class_tokens = 'hoge girl'\ncaption_extension = '.txt'", dataset="resolution = 64")
    )
    listing = read_folder(source.folder, source.settings)
    found = {entry.name: (entry.caption.plain, entry.repeats) for entry in listing.entries}
    assert found == {
        "0.png": ("hoge girl", 1),
        "1.png": ("hoge girl, sitting, red", 1),
        "2.png": ("hoge girl", 1),
    }
    assert any("2 captions are the words of their class_tokens" in note for note in listing.notes)


def test_names_of_folders_mean_nothing_in_the_file(root):
    (root / "sets" / "hoge").rename(root / "sets" / "10_sks dog")
    (source,), _ = _read(root, _one().replace("'hoge'", "'10_sks dog'"), resolution=64, validation=0.0)
    listing = read_folder(source.folder, source.settings)
    assert {(entry.caption.plain, entry.repeats) for entry in listing.train} == {
        ("", 1),
        ("hoge girl, sitting, red", 1),
    }


def test_a_metadata_json_says_captions_and_which_images_there_are(root):
    records = {
        "0": {"caption": "a cat", "tags": "cat, gray", "train_resolution": [64, 64]},
        str(root / "sets" / "piyo" / "1.png"): {"tags": "dog\nbrown"},
    }
    (root / "md.json").write_text(json.dumps(records), encoding="utf-8")
    keys = "metadata_file = 'md.json'\nimage_dir = 'piyo'"  # below the input folder, not beside the file
    (source,), _ = _read(root, _one(keys).replace("image_dir = 'hoge'\n", ""), resolution=64, validation=0.0)
    listing = read_folder(source.folder, source.settings)
    assert {entry.name: entry.caption.plain for entry in listing.train} == {
        "0.png": "a cat, cat, gray",
        "1.png": "dog, brown",
    }
    assert any("1 left out that metadata_file does not name" in note for note in listing.notes)
    assert any("train_resolution of the metadata JSON is not used" in note for note in listing.notes)
    assert paths_in(root / "sets" / "dataset_config.toml", root) == [root / "sets" / "piyo", root / "md.json"]


@pytest.mark.parametrize("value", ["/etc", "../../outside", "C:\\\\hoge", "", "hoge/../../../x", "link"])
def test_no_path_leaves_the_input_folder(root, value):
    (root.parent / "outside").mkdir()
    (root / "sets" / "link").symlink_to(root.parent / "outside")
    with pytest.raises(ValueError, match=r"subset 1: image_dir .* is outside ComfyUI's input folder: copy or link"):
        _read(root, f'[[datasets]]\n[[datasets.subsets]]\nimage_dir = "{value}"\n')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[datasets]\n", r"is not TOML: .*line 1"),
        ("", r"it has no \[\[datasets\]\]"),
        ("[[datasets]]\nresolution = 512\n", r"\[\[datasets\]\] 1 has no \[\[datasets.subsets\]\]"),
        ("general = 3\n" + _one().replace("[general]", ""), r"\[general\] is 3, expected a table"),
        ("[other]\n" + _one(), "unknown key 'other'"),
        (_one("num_repeat = 3"), r"\[\[datasets\]\] 1 subset 1: unknown key 'num_repeat', did you mean num_repeats"),
        (_one("num_repeats = 'x'"), "subset 1: num_repeats is 'x', expected a whole number from 1 to 10000"),
        (_one("shuffle_caption = 1"), "shuffle_caption is 1, expected true or false"),
        (_one("color_aug = true"), "color_aug is True, expected false, as Graft does not do this; take the key out"),
        (_one("caption_dropout_every_n_epochs = 2"), "caption_dropout_every_n_epochs is 2, expected 0"),
        (_one("secondary_separator = ';;;'"), "secondary_separator is ';;;', expected '', as Graft does not"),
        (_one("resolution = 512"), r"resolution belongs to \[general\] or \[\[datasets\]\]"),
        (_one("", general="is_reg = true"), r"\[general\]: is_reg belongs to \[\[datasets.subsets\]\]"),
        (_one("is_reg = true"), "every subset has is_reg; one needs images to train on"),
        (_one("caption_extension = '.cap'"), "caption_extension is '.cap', expected .txt or .caption; rename"),
        (
            _one(dataset="resolution = 1000000000000000000000000000000"),
            r"resolution is 10+, expected a whole number from 64 to 8192",
        ),
        (_one(dataset="max_bucket_reso = 99999999"), r"expected a whole number from 1 to 16384"),
        (
            _one(dataset="resolution = [512]"),
            r"resolution is \[512\], expected one number, or width and height in a list",
        ),
        (_one(dataset="resolution = [512, 9999]"), r"resolution is \[512, 9999\], expected a whole number from 64"),
        (
            _one(dataset="resolution = [512, 764]\nenable_bucket = false"),
            "subset 1: resolution is 512 x 764, expected a multiple of 8",
        ),
        (
            _one(dataset="resolution = 72\nenable_bucket = false\nbucket_reso_steps = 12"),
            "bucket_reso_steps is 12, expec",
        ),
        (
            _one(dataset="min_bucket_reso = 1024\nmax_bucket_reso = 512"),
            "min_bucket_reso is 1024, larger than max_bucket",
        ),
        (_one(dataset="min_bucket_reso = 100"), r"min_bucket_reso is 100, expected a multiple of bucket_reso_steps"),
        (_one().replace("'hoge'", "'nowhere'"), r"there is no folder 'nowhere' \(image_dir\); copy or link it there"),
        (_one("metadata_file = 'no.json'"), r"there is no file 'no.json' \(metadata_file\)"),
        ("[[datasets]]\n[[datasets.subsets]]\nnum_repeats = 2\n", "subset 1: image_dir is missing"),
        ("[[datasets]]\nsubsets = [3]\n", r"subset 1 is 3, expected a table"),
        ("datasets = [3]\n", r"\[\[datasets\]\] 1 is 3, expected a table"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(root, text, message):
    with pytest.raises(ValueError, match=f"^Dataset: dataset_config.toml.*{message}"):
        _read(root, text)
    assert paths_in(root / "sets" / "dataset_config.toml", root) in ([], [root / "sets" / "hoge"])


def test_everything_wrong_is_said_at_once(root):
    with pytest.raises(ValueError) as caught:
        _read(root, _one("color_aug = true\nnum_repeats = 0", general="batch_size = 0"))
    assert all(part in str(caught.value) for part in ("batch_size is 0", "color_aug is True", "num_repeats is 0"))


def test_what_kohyas_scripts_pass_over_is_noted(root):
    dataset = "bucket_no_upscale = true\nmin_bucket_reso = 256\nkeep_tokens = 1\nvalidation_seed = 3"
    again = "[[datasets.subsets]]\nimage_dir = 'hoge'\n[[datasets]]\nenable_bucket = false\nbucket_no_upscale = true\n"
    again += "[[datasets.subsets]]\nimage_dir = 'hoge'\ncache_info = true\nrandom_crop = true\n"
    sources, notes = _read(root, _one(dataset=dataset) + again)
    assert len(sources) == 2  # the second subset of the first dataset is the same, that of the second dataset is not
    assert [(s.settings.buckets, s.settings.no_upscale, s.settings.min_side) for s in sources] == [
        (True, True, 0),
        (False, False, 0),
    ]
    assert sources[1].settings.filters == Filters(crop="random") and sources[0].settings.keep_tags == 0
    for part in (
        "subset 2 has the images of subset 1 and is left out, as in kohya's scripts",
        "with bucket_no_upscale, min_bucket_reso and max_bucket_reso do nothing",
        "enable_bucket is false, so its other bucket settings do nothing",
        "keep_tokens does nothing where no tags are shuffled or dropped",
        "validation_seed does nothing",
        "cache_info does nothing",
        "random_crop: each image has crops of its own",
    ):
        assert any(part in note for note in notes), part


def test_the_keys_that_become_filters(root):
    keys = "enable_wildcard = true\nkeep_tokens_separator = '|||'\ncaption_suffix = ', x'\nalpha_mask = true"
    (source,), _ = _read(root, _one(keys), filters=Filters(trigger="zorp"))
    assert source.settings.filters == Filters(
        trigger="zorp", wildcards=True, keep_separator="|||", caption_suffix=", x", masks="alpha"
    )


@pytest.mark.parametrize("name", ["x" * 5000, "loop"])
def test_a_name_that_no_system_can_open_is_a_missing_folder(root, name):
    (root / "sets" / "loop").symlink_to(root / "sets" / "loop")
    with pytest.raises(ValueError, match=r"subset 1: there is no folder '.*' \(image_dir\)"):
        _read(root, f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = '{name}'\n")


def _draw(root, *names):
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)


CONTROLS = {
    "musubi-tuner's": "[[datasets]]\nimage_directory = 'after'\ncontrol_directory = 'before'\ncache_directory = 'x'\n",
    "AI-Toolkit's": (
        "[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'after'\ncontrol_path = ['before', 'sets/second']\n"
    ),
}


@pytest.mark.parametrize("kind", CONTROLS)
def test_folders_of_control_pictures(root, kind):
    _draw(root, "after/a.png", "after/b.png", "before/a.jpg", "before/b_0.png", "before/b_1.png", "sets/second/a.png")
    _draw(root, "before/unused.png")
    file = root / "dataset_config.toml"
    file.write_text(CONTROLS[kind], encoding="utf-8")
    base = FolderSource(root, FolderSettings(resolution=64, bucket_step=32, validation=0.0))
    sources, notes = read_config(file, root, base)
    listing = read_folder(sources[0].folder, sources[0].settings)
    found = {entry.name: [control.name for control in entry.controls] for entry in listing.entries}
    second = ["../sets/second/a.png"] if kind == "AI-Toolkit's" else []
    assert found == {
        "a.png": ["../before/a.jpg", *second],
        "b.png": ["../before/b_0.png", "../before/b_1.png"],
    }
    assert listing.problems[0].startswith("../before/unused.png: no image uses this control picture")
    assert paths_in(file, root)[1:] == [root / "before", *([root / "sets" / "second"] if second else [])]
    if not second:
        assert notes == ["cache_directory does nothing: Graft has a cache of its own"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("control_path = 'nowhere'", "there is no folder 'nowhere' (control_path)"),
        ("control_path = '../out'", "control_path '../out' is outside ComfyUI's input folder"),
        ("control_path = ['a', 'b', 'c', 'd']", "expected a folder, or a list of up to 3"),
        ("control_path = 'hoge'\ncontrol_directory = 'hoge'", "control_directory and control_path mean the same"),
    ],
)
def test_control_folders_that_cannot_be_read(root, text, message):
    file = root / "dataset_config.toml"
    (root / "hoge").mkdir()
    file.write_text(f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'hoge'\n{text}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"Dataset: dataset_config\.toml") as error:
        read_config(file, root, FolderSource(root, FolderSettings()))
    assert message in str(error.value)


def test_a_dataset_has_one_folder_or_subsets(root):
    file = root / "dataset_config.toml"
    file.write_text("[[datasets]]\nimage_directory = 'hoge'\n[[datasets.subsets]]\nimage_dir = 'hoge'\n")
    with pytest.raises(ValueError, match=r"has image_directory and \[\[datasets.subsets\]\]; write one of them"):
        read_config(file, root, FolderSource(root, FolderSettings()))


MUSUBIS_GENERAL = """
[general]
resolution = [960, 544]
caption_extension = ".txt"
batch_size = 1
enable_bucket = true
bucket_no_upscale = false
"""
MUSUBIS_SAMPLES = {  # of docs/dataset_config.md of musubi-tuner, with paths that lie in the input folder
    "pictures": """
[[datasets]]
image_directory = "sets/hoge"
cache_directory = "cache_directory"
num_repeats = 1 # optional, default is 1. Number of times to repeat the dataset.
""",
    "listed pictures": """
[[datasets]]
image_jsonl_file = "pictures.jsonl"
cache_directory = "cache_directory" # required for metadata jsonl file
num_repeats = 1 # optional, default is 1. Same as above.
""",
    "clips": """
[[datasets]]
video_directory = "clips"
cache_directory = "cache_directory" # recommended to set cache directory
target_frames = [1, 25, 45]
frame_extraction = "head"
source_fps = 30.0 # optional, source fps for videos in the directory, decimal number

[[datasets]]
video_directory = "clips"
cache_directory = "cache_directory2" # recommended to set cache directory
frame_extraction = "full"
max_frames = 45
""",
    "listed clips": """
[[datasets]]
video_jsonl_file = "clips.jsonl"
target_frames = [1, 25, 45]
frame_extraction = "head"
cache_directory = "cache_directory_head"
source_fps = 30.0 # optional, source fps for videos in the jsonl file
# same metadata jsonl file can be used for multiple datasets
[[datasets]]
video_jsonl_file = "clips.jsonl"
target_frames = [1]
frame_stride = 10
cache_directory = "cache_directory_stride"
""",
}
# Buckets of bucket step 32, of at most 960 x 544 pixels: the nearest of a square, a wide and a tall picture.
MUSUBIS_BUCKETS = {(64, 64): (704, 704), (96, 54): (960, 544), (54, 96): (544, 960)}


@pytest.mark.parametrize("name", MUSUBIS_SAMPLES)
def test_musubis_own_samples(root, name):
    for size in MUSUBIS_BUCKETS:
        Image.new("RGB", size, (size[0], 90, 9)).save(root / "sets" / "hoge" / f"{size[0]}.png")
    write_clip(root / "clips" / "walk.mkv", 48, (96, 54))
    _lines(root / "pictures.jsonl", *({"image_path": f"sets/hoge/{w}.png", "caption": "a"} for w, _ in MUSUBIS_BUCKETS))
    _lines(root / "clips.jsonl", {"video_path": "clips/walk.mkv", "caption": "a"})
    sources, notes = _clip_sources(root, MUSUBIS_GENERAL + MUSUBIS_SAMPLES[name], frame_step=4)
    assert {source.settings.own_resolution for source in sources} == {(960, 544)}
    assert any("cache_directory does nothing" in note for note in notes)
    listings = [read_folder(source.folder, source.settings) for source in sources]
    found = {(entry.size, entry.bucket) for listing in listings for entry in listing.entries}
    if "clips" not in name:
        assert MUSUBIS_BUCKETS.items() <= found
        return
    lengths = [sorted(len(entry.frames) for entry in listing.entries) for listing in listings]
    assert lengths == [[1, 25, 45], {"clips": [45], "listed clips": [1]}[name]]
    assert found == {((96, 54), (960, 544))}


def test_without_buckets_a_resolution_is_the_size_of_all_images(root):
    Image.new("RGB", (100, 50)).save(root / "sets" / "hoge" / "wide.png")
    lines = "resolution = [64, 96]\nenable_bucket = false"
    (source,), _ = _read(root, _one(dataset=lines))
    assert source.settings.own_resolution == (64, 96) and source.settings.bucket_choices() == [[(64, 96)]]
    listing = read_folder(source.folder, source.settings)
    framings = {entry.size: entry.framings[0] for entry in listing.entries}
    assert {framing.target for framing in framings.values()} == {(64, 96)}
    assert framings[(100, 50)].scaled == (192, 96) and framings[(100, 50)].left == 64
    assert framings[(64, 64)].scaled == (96, 96) and framings[(64, 64)].left == 16
    assert folder_metadata(listing)["settings"]["ss_resolution"] == "(64, 96)"


def test_no_upscale_shrinks_to_the_area_of_the_resolution(root):
    for number, size in enumerate(((400, 300), (96, 64))):
        Image.new("RGB", size, (number, 0, 0)).save(root / "sets" / "hoge" / f"x{number}.png")
    lines = "resolution = [192, 128]\nbucket_no_upscale = true\nbucket_reso_steps = 8\n"
    (source,), _ = _read(root, _one(dataset=lines), filters=Filters(resolutions=(64,)))
    assert source.settings.resolutions == ((192, 128), (64, 64))
    listing = read_folder(source.folder, source.settings)
    found = {(entry.size, entry.bucket) for entry in listing.entries}
    # 192 x 128 pixels in the shape of 4:3 are 181 x 136; of 64 x 64 pixels 64 x 48 keeps 4:3 best, and 72 x 48 3:2
    assert found == {
        ((400, 300), (176, 136)),
        ((400, 300), (64, 48)),
        ((96, 64), (96, 64)),
        ((96, 64), (72, 48)),
        ((64, 64), (64, 64)),
    }


MUSUBI = """
[general]
resolution = 64
caption_extension = ".txt"
batch_size = 1
enable_bucket = true

[[datasets]]
video_directory = "clips"
cache_directory = "x"
target_frames = [1, 6]
frame_extraction = "uniform"
frame_sample = 3
source_fps = 30.0

[[datasets]]
image_directory = "sets/hoge"
"""


def _clip_sources(root, text, **base):
    file = root / "dataset_config.toml"
    file.write_text(text, encoding="utf-8")
    settings = FolderSettings(resolution=64, bucket_step=32, validation=0.0, **base)
    return read_config(file, root, FolderSource(root, settings))


def test_musubis_datasets_of_clips(root):
    write_clip(root / "clips" / "walk.mkv", 20, (64, 64))
    (root / "clips" / "walk.txt").write_text("a cat walks", encoding="utf-8")
    sources, notes = _clip_sources(root, MUSUBI, frame_step=4)
    clips, stills = sources
    assert (clips.settings.frames, clips.settings.clip_part, clips.settings.filters.frame_sample) == (
        "1, 6",
        "uniform",
        3,
    )
    assert stills.settings.frames == "0"
    entries = read_folder(clips.folder, clips.settings).entries
    assert [(entry.frames[0], len(entry.frames)) for entry in entries] == [
        (0, 1),
        (9, 1),
        (19, 1),
        (0, 5),
        (7, 5),
        (15, 5),
    ]
    assert {entry.caption.plain for entry in entries} == {"a cat walks"}
    assert any(note.startswith("source_fps does nothing") for note in notes)


@pytest.mark.parametrize(
    ("keys", "expected", "said"),
    [
        ("", ("1", "head", 4, 10), "without target_frames each clip gives 1 frame"),
        ("frame_extraction = 'full'", ("129", "full", 4, 10), ""),
        ("frame_extraction = 'full'\nmax_frames = 33", ("33", "full", 4, 10), ""),
        ("target_frames = [9]\nframe_extraction = 'slide'", ("9", "slide", 4, 1), ""),
        ("target_frames = [9]\nframe_extraction = 'uniform'", ("9", "uniform", 1, 10), ""),
        ("target_frames = [9]\nframe_sample = 3", ("9", "head", 4, 10), "frame_sample does nothing with frame_extract"),
    ],
)
def test_musubis_defaults_for_clips(root, keys, expected, said):
    write_clip(root / "clips" / "walk.mkv", 20, (64, 64))
    sources, notes = _clip_sources(root, f"[[datasets]]\nvideo_directory = 'clips'\n{keys}\n")
    settings = sources[0].settings
    found = settings.frames, settings.clip_part, settings.filters.frame_sample, settings.filters.frame_stride
    assert found == expected
    assert said in "\n".join(notes)


def test_the_nodes_clips_count_where_the_file_says_nothing(root):
    write_clip(root / "clips" / "walk.mkv", 20, (64, 64))
    text = "[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'clips'\n"
    sources, _ = _clip_sources(root, text, frames="5", frame_rate=4.0, clip_part="chunk")
    entries = read_folder(sources[0].folder, sources[0].settings).entries
    assert [entry.frames for entry in entries] == [(0, 2, 4, 6, 8), (10, 12, 14, 16, 18)]
    notes = _clip_sources(root, text + "frame_extraction = 'chunk'\n")[1]
    assert notes == ["[[datasets]] 1 subset 1: without target_frames and with frames of clips 0, clips are left out"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("video_directory = 'clips'\nimage_directory = 'clips'", "has image_directory and video_directory; write one"),
        ("video_directory = 'clips'\n[[datasets.subsets]]", "has video_directory and [[datasets.subsets]]; write one"),
        ("video_directory = 'clips'\ntarget_frames = [0]", "expected a list of whole numbers from 1 to 1000"),
        ("video_directory = 'clips'\ntarget_frames = []", "expected a list with at least one number"),
        ("video_directory = 'clips'\nframe_extraction = 'tail'", "head, uniform, chunk, slide"),
        ("video_directory = '../clips'", "outside ComfyUI's input folder"),
        ("video_jsonl_file = 'clips.jsonl'", "video_jsonl_file"),
    ],
)
def test_wrong_keys_of_clips_are_refused(root, text, said):
    (root / "clips").mkdir()
    with pytest.raises(ValueError, match=re.escape(said)):
        _clip_sources(root, f"[[datasets]]\n{text}\n")


def _lines(file, *records):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(map(json.dumps, records)) + "\n\n", encoding="utf-8")


JSONL = "[general]\ncaption_extension = '.txt'\n[[datasets]]\nimage_jsonl_file = 'list.jsonl'\nnum_repeats = 3\n"


def test_musubis_jsonl_names_pictures_captions_and_control_pictures(root):
    _draw(root, "one/a.png", "two/deep/b.png", "two/unlisted.png", "before/a.jpg", "before/b.png", "other/b.png")
    (root / "one" / "a.txt").write_text("not this caption", encoding="utf-8")
    _lines(
        root / "list.jsonl",
        {
            "image_path": "two/deep/b.png",
            "caption": " b, and\nmore ",
            "control_path_1": "other/b.png",
            "control_path_0": "before/b.png",
        },
        {"image_path": "one\\a.png", "caption": "make it blue", "control_path": "before/a.jpg"},
    )
    sources, notes = _clip_sources(root, JSONL)
    assert notes == [] and sources[0].folder == root and sources[0].settings.repeats == 3
    listing = read_folder(root, sources[0].settings)
    assert not listing.problems
    found = {entry.name: (entry.caption.plain, [one.name for one in entry.controls]) for entry in listing.entries}
    assert found == {
        "two/deep/b.png": ("b, and\nmore", ["before/b.png", "other/b.png"]),
        "one/a.png": ("make it blue", ["before/a.jpg"]),
    }
    file = root / "dataset_config.toml"
    assert set(paths_in(file, root)) == {root, root / "list.jsonl", root / "before", root / "other"}


def test_a_listed_link_to_a_file_without_an_ending_has_its_own_name(root):
    _draw(root, "set/a.png", "set/b.png")
    (root / "blobs").mkdir()
    for name in ("a", "b"):
        (root / "set" / f"{name}.png").rename(root / "blobs" / name)
    (root / "set" / "a.png").symlink_to(root / "blobs" / "a")
    (root / "set" / "linked.png").symlink_to(root.parent / "outside")
    (root.parent / "outside").write_bytes((root / "blobs" / "b").read_bytes())
    _lines(root / "list.jsonl", {"image_path": "set/a.png", "caption": "a cat"})
    (listed,), _ = _clip_sources(root, JSONL)
    listing = read_folder(listed.folder, listed.settings)
    assert [(entry.name, entry.caption.plain) for entry in listing.entries] == [("a.png", "a cat")]
    _lines(root / "list.jsonl", {"image_path": "set/linked.png", "caption": "a cat"})
    with pytest.raises(ValueError, match=r"'set/linked\.png' is outside ComfyUI's input folder"):
        _clip_sources(root, JSONL)


def test_listed_pictures_without_control_pictures_are_those_of_a_folder(root):
    """The same as the folder with caption files."""
    _draw(root, "set/a.png", "set/b.png")
    for name in "ab":
        (root / "set" / f"{name}.txt").write_text(f"picture {name}", encoding="utf-8")
    _lines(root / "list.jsonl", *[{"image_path": f"set/{name}.png", "caption": f"picture {name}"} for name in "ab"])
    (listed,), _ = _clip_sources(root, JSONL)
    (folder,), _ = _clip_sources(root, "[[datasets]]\nimage_directory = 'set'\nnum_repeats = 3\n")
    assert listed.folder == folder.folder == root / "set"
    first, second = read_folder(listed.folder, listed.settings), read_folder(folder.folder, folder.settings)
    assert first.entries == second.entries and first.digest == second.digest


@pytest.mark.parametrize(
    ("text", "size", "notes"),
    [
        ("", ControlSize(), 0),
        ("control_resolution = [1024, 512]", ControlSize(1024 * 512), 0),
        ("control_resolution = 768", ControlSize(768 * 768), 0),
        ("no_resize_control = true", ControlSize(kept=True), 0),
        ("no_resize_control = true\ncontrol_resolution = [2024, 2024]", ControlSize(2024 * 2024, True), 0),
        ("flux_kontext_no_resize_control = true", ControlSize(kept=True), 0),
        ("qwen_image_edit_no_resize_control = true", ControlSize(kept=True), 0),
        ("qwen_image_edit_control_resolution = [1024, 1024]", ControlSize(1024 * 1024), 0),
        ("qwen_image_edit_control_resolution = 64\ncontrol_resolution = 512", ControlSize(512 * 512), 1),
    ],
)
@pytest.mark.parametrize("source", ["image_directory = 'one'", "image_jsonl_file = 'list.jsonl'"])
def test_musubis_sizes_of_control_pictures(root, text, size, notes, source):
    _draw(root, "one/a.png", "before/a.png")
    _lines(root / "list.jsonl", {"image_path": "one/a.png", "caption": "a", "control_path": "before/a.png"})
    sources, found = _clip_sources(root, f"[[datasets]]\n{source}\n{text}\n")
    assert sources[0].settings.subset.control_size == size and len(found) == notes
    if notes:
        assert "qwen_image_edit_control_resolution does nothing beside control_resolution" in found[0]


def test_musubis_jsonl_of_clips(root):
    write_clip(root / "clips" / "walk.mkv", 9, (64, 64))
    _draw(root, *[f"clips/run.frames/{number}.png" for number in range(5)])
    _lines(
        root / "list.jsonl",
        {"video_path": "clips/walk.mkv", "caption": "a cat walks"},
        {"video_path": "clips/run.frames", "caption": "a cat runs"},
    )
    text = "[[datasets]]\nvideo_jsonl_file = 'list.jsonl'\ntarget_frames = [1, 5]\nframe_extraction = 'head'\n"
    (source,), _ = _clip_sources(root, text, frame_step=4)
    listing = read_folder(source.folder, source.settings)
    found = sorted((entry.name, entry.caption.plain, len(entry.frames)) for entry in listing.entries)
    assert found == [
        ("run.frames", "a cat runs", 1),
        ("run.frames", "a cat runs", 5),
        ("walk.mkv", "a cat walks", 1),
        ("walk.mkv", "a cat walks", 5),
    ]
    (source,), notes = _clip_sources(root, "[[datasets]]\nvideo_jsonl_file = 'list.jsonl'\n")
    assert source.settings.frames == "1" and "each clip gives 1 frame" in notes[0]


@pytest.mark.parametrize(
    ("key", "record", "message"),
    [
        ("image", {"image_path": "../out.png", "caption": "a"}, "line 2: image_path '../out.png' is outside ComfyUI's"),
        (
            "image",
            {"image_path": "no.png", "caption": "a"},
            "line 2: there is no picture or clip 'no.png' (image_path)",
        ),
        ("image", {"image_path": "hoge/b.png"}, "line 2: caption is missing"),
        ("image", {"image_path": "hoge/b.png", "caption": 3}, "line 2: caption is 3, expected a text"),
        ("image", {"image_path": "hoge/a.png", "caption": "a"}, "line 2: image_path is in an earlier line too"),
        (
            "image",
            {"image_path": "words.txt", "caption": "a"},
            "image_path words.txt is not a picture that Graft reads",
        ),
        ("image", {"image_path_0": "hoge/b.png", "caption": "a"}, "are the layers of Qwen-Image-Layered"),
        ("image", ["hoge/b.png"], "line 2: it is ['hoge/b.png'], expected an object"),
        (
            "image",
            {"image_path": "hoge/b.png", "caption": "a"} | {f"control_path_{n}": "hoge/b.png" for n in range(4)},
            "line 2: it has 4 control pictures, expected at most 3",
        ),
        ("video", {"video_path": "frames", "caption": "a"}, "frames holds the frames of a clip: name it frames.frames"),
        ("video", {"video_path": "words.txt", "caption": "a"}, "video_path words.txt is not a clip that Graft reads"),
        (
            "video",
            {"video_path": "other.mkv", "caption": "a", "control_path": "clip.mkv"},
            "control_path clip.mkv is not a picture that Graft reads; control clips go through Samples",
        ),
    ],
)
def test_lines_that_cannot_be_read_are_named(root, key, record, message):
    _draw(root, "hoge/a.png", "hoge/b.png", "frames/1.png")
    (root / "words.txt").write_text("words", encoding="utf-8")
    for name in ("clip.mkv", "other.mkv"):
        (root / name).write_bytes(b"")
    first = {"image": "hoge/a.png", "video": "clip.mkv"}[key]
    _lines(root / "list.jsonl", {f"{key}_path": first, "caption": "a"}, record)
    with pytest.raises(ValueError, match=r"dataset_config.toml: \[\[datasets\]\] 1: list.jsonl: line 2: ") as error:
        _clip_sources(root, f"[[datasets]]\n{key}_jsonl_file = 'list.jsonl'\n")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image_jsonl_file = 'no.jsonl'", "there is no file 'no.jsonl' (image_jsonl_file)"),
        ("image_jsonl_file = 'empty.jsonl'", "empty.jsonl has no lines as"),
        ("image_jsonl_file = 'empty.jsonl'\nimage_directory = 'hoge'", "has image_directory and image_jsonl_file"),
        ("image_jsonl_file = 'empty.jsonl'\ncontrol_directory = 'hoge'", "control_directory does nothing beside"),
        (
            "image_directory = 'hoge'\nmultiple_target = true",
            "multiple_target is True, expected false, as several targets are the layers of Qwen-Image-Layered",
        ),
        ("image_directory = 'hoge'\nfp_latent_window_size = 9", "it is for FramePack, which Graft does not train"),
        ("image_directory = 'hoge'\nno_resize_control = 1", "no_resize_control is 1, expected true or false"),
        ("image_directory = 'hoge'\ncontrol_resolution = [64]", "expected one number, or width and height in a list"),
        ("image_directory = 'hoge'\ncontrol_resolution = 9", "control_resolution is 9, expected a whole number"),
        ("image_jsonl_file = 'many.jsonl'", "line 5: caption is missing; and 2 more lines"),
        ("image_jsonl_file = 'dataset_config.toml'", "line 1: it is not JSON (Expecting value"),
        ("image_jsonl_file = 'latin.jsonl'", "latin.jsonl is not UTF-8 text"),
    ],
)
def test_jsonl_files_that_cannot_be_read(root, text, message):
    _draw(root, "hoge/a.png")
    (root / "empty.jsonl").write_text("\n", encoding="utf-8")
    (root / "latin.jsonl").write_bytes('{"caption": "é"}'.encode("latin-1"))
    _lines(root / "many.jsonl", *[{"image_path": "hoge/a.png"}] * 7)
    with pytest.raises(ValueError, match=r"Dataset: dataset_config\.toml") as error:
        _clip_sources(root, f"[[datasets]]\n{text}\n")
    assert message in str(error.value)


def test_a_list_that_is_too_large_is_refused_by_name(tmp_path):
    with open(tmp_path / "pictures.jsonl", "wb") as file:
        file.truncate((256 << 20) + 1)
    with pytest.raises(ValueError, match=r"^pictures\.jsonl: it is larger than 256 MB"):
        read_jsonl(tmp_path / "pictures.jsonl", "image_path", lambda name, path: path)


def test_a_listed_picture_in_another_spelling_than_the_disks(root):
    _draw(root, "one/e\u0301.png")
    _lines(root / "list.jsonl", {"image_path": "one/\u00e9.PNG", "caption": "accent"})
    (source,), _ = _read(root, JSONL.replace("list.jsonl", "../list.jsonl"))
    listing = read_folder(source.folder, source.settings)
    assert {entry.name: entry.caption.plain for entry in listing.entries} == {"e\u0301.png": "accent"}
