"""docs/planning.md says what was planned of models of full size."""

from graft_nodes.tests.with_comfyui import planned_sizes, write_plans


def test_the_table_is_that_of_the_file():
    text = write_plans.DOCUMENT.read_text(encoding="utf-8")
    assert text == write_plans.document_with(text)
    assert "\n".join(write_plans.table()) in text


def test_every_model_is_planned_at_every_size_and_checkpointing_saves():
    for title in planned_sizes.TEXTS:
        by_pixels = planned_sizes.stored()[title]
        assert set(by_pixels) == {key for key, _, _ in write_plans.wanted()}
        for plans in by_pixels.values():
            plain, saved = plans[planned_sizes.PLAIN], plans[planned_sizes.CHECKPOINTED]
            assert saved["activations"] < plain["activations"] / 4
            assert saved["weights"] == plain["weights"]
