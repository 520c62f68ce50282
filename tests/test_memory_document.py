"""docs/memory.md, and the sentences of docs/quick_starts.md, say what Training Recipe chooses today."""

import json

import pytest
from graft_nodes.tests.with_comfyui import full_sizes, planned_sizes, step_work, write_memory


def test_the_page_is_what_the_recipe_chooses():
    assert write_memory.DOCUMENT.read_text(encoding="utf-8") == write_memory.document()


def test_the_sentences_of_the_quick_starts_are_those_of_the_recipe():
    text = write_memory.QUICK_STARTS.read_text(encoding="utf-8")
    assert text == write_memory.quick_starts_with(text)
    assert all(sentence in text for sentence in write_memory.sentences().values())
    assert set(write_memory.sentences()) == {write_memory.SDXL, write_memory.FLUX}


def test_the_sentences_say_what_the_table_says():
    """Of the rows SDXL, and Flux.1 dev in fp8: 12 GB, and the first card where no layer waits in RAM."""
    rows = {line.split(" | ")[0]: line.strip("| ").split(" | ")[2:] for line in write_memory.summary()}
    sdxl, flux = rows["| SDXL"], rows["| Flux.1 dev in fp8"]
    assert sdxl[1].split(",")[0] in write_memory.sentences()[write_memory.SDXL]
    assert flux[1].split(",")[0] in write_memory.sentences()[write_memory.FLUX]
    (size, cell), *_ = ((size, cell) for size, cell in zip((8, 12, 16, 24), flux, strict=True) if "RAM" not in cell)
    assert f"From {size} GB on" in write_memory.sentences()[write_memory.FLUX]
    assert f"on the card: {cell.split(',')[0]}," in write_memory.sentences()[write_memory.FLUX]


def test_the_steps_are_those_of_the_templates():
    for title in ("Train a LoRA for SDXL", "Train a LoRA for Flux.1"):
        path = write_memory.ROOT / "example_workflows" / f"{title}.json"
        nodes = json.loads(path.read_text(encoding="utf-8"))["nodes"]
        (step,) = (node for node in nodes if node["type"] == "TrainStep")
        assert step["widgets_values"][0] == write_memory.STEPS


def test_a_step_of_flux_computes_what_its_layers_say():
    """From its published sizes: each of 57 blocks has 12 matrices of width x width for each token, and attention."""
    width, blocks, tokens = 3072, 19 + 38, 64 * 64 + 512
    linear = 2 * 12 * width**2 * blocks * tokens
    attention = 4 * width * blocks * tokens**2
    # Forward, forward again, and the gradients of inputs; attention's are four products.
    expected = 3 * linear + (2 + 2) * attention
    counted = step_work.stored()["Flux.1 dev"][planned_sizes.CHECKPOINTED]
    assert counted == pytest.approx(expected, rel=0.03)


def test_checkpointing_computes_the_forward_pass_again():
    work = step_work.stored()["SDXL"]
    assert 1.3 < work[planned_sizes.CHECKPOINTED] / work[planned_sizes.PLAIN] < 1.5


def test_copies_count_where_they_take_longer():
    """Flux in bf16 on a card whose products cost nothing: the blocks that do not fit go over the bus twice."""
    flux = full_sizes.stored()["Flux.1 dev"][full_sizes.BF16]
    endless = write_memory.Card("endless", 12, 10**9, 10.0)
    found = write_memory.pace("Flux.1 dev", flux, endless)
    stay = 9 * flux.largest_block  # 10.8 - 4.5 GB has room for nine of 0.65
    assert found.seconds == pytest.approx(2 * (flux.weight_bytes - flux.outside - stay) / 25e9)


@pytest.mark.parametrize("size", write_memory.SIZES)
def test_nothing_in_the_page_takes_more_than_its_card(size):
    for facts in (facts for by_dtype in full_sizes.stored().values() for facts in by_dtype.values()):
        assert write_memory.chosen(facts, size).estimate.total <= 0.9 * size * 2**30


def test_every_model_of_the_list_is_in_the_file():
    assert {title: tuple(by_dtype) for title, by_dtype in full_sizes.stored().items()} == {
        title: full_sizes.dtypes(title) for title in full_sizes.FULL
    }
