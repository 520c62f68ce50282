"""Names that a missing LoRA file may have been."""

import random
import time

import pytest
from graft_nodes.patches.lora_files.near_names import near_names

FILES = (
    "other/anime_v2.safetensors",
    "styles/anime-v2.1.safetensors",
    "styles/robot_v2.safetensors",
    "PaperCut.safetensors",
    "flux/v2 anime.safetensors",
    "lora0.safetensors",
    "墨水 风格.safetensors",
    "x.safetensors",
)


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        (
            "styles/anime_v2",
            ["other/anime_v2.safetensors", "flux/v2 anime.safetensors", "styles/anime-v2.1.safetensors"],
        ),
        ("styles\\Anime_V2.safetensors", ["other/anime_v2.safetensors", "flux/v2 anime.safetensors"]),
        ("paper_cut.safetensors", ["PaperCut.safetensors"]),
        ("papercutt.safetensors", ["PaperCut.safetensors"]),
        ("lora_0.safetensors", ["lora0.safetensors"]),
        ("墨水.safetensors", ["墨水 风格.safetensors"]),
        ("qq", []),
        ("", []),
        ("v2", []),
    ],
)
def test_names_with_the_same_parts_are_near(missing, expected):
    if "." not in missing and missing:
        missing += ".safetensors"
    assert near_names(missing, FILES)[: len(expected) or 3] == expected


def test_of_equal_names_the_one_in_the_same_folder_comes_first_and_then_the_highest_version():
    names = ["a/cat v1.safetensors", "b/cat v1.safetensors", "b/cat v2.safetensors", "c/cat v3.safetensors"]
    assert near_names("b/cat.safetensors", names) == [names[2], names[1], names[3]]


def test_ten_thousand_names_are_compared_in_time():
    draw = random.Random(0)
    words = ("anime", "style", "paper", "cut", "night", "portrait", "film", "grain", "sketch", "ink")
    names = [f"{draw.choice(words)}/{draw.choice(words)} {draw.choice(words)} v{n}.safetensors" for n in range(10_000)]
    start = time.process_time()
    assert len(near_names("gone/film_grain-v7.safetensors", names)) == 3
    assert time.process_time() - start < 3  # 0.1 s on a quiet machine; it must not grow with the square
