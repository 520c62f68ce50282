"""docs/planning.md says what was planned of models of full size."""

from graft_nodes.tests.with_comfyui import planned_sizes, write_plans
from graft_nodes.training.recipes.estimate import GB


def test_the_table_is_that_of_the_file():
    text = write_plans.DOCUMENT.read_text(encoding="utf-8")
    assert text == write_plans.document_with(text)
    assert "\n".join(write_plans.table()) in text
    assert "\n".join(write_plans.full_table()) in text


def test_every_model_is_planned_at_every_size_and_checkpointing_saves():
    for title in planned_sizes.TEXTS:
        by_pixels = planned_sizes.stored()[title]
        assert set(by_pixels) == {key for key, _, _ in write_plans.wanted()}
        for plans in by_pixels.values():
            plain, saved = plans[planned_sizes.PLAIN], plans[planned_sizes.CHECKPOINTED]
            assert saved["activations"] < plain["activations"] / 4
            assert saved["weights"] == plain["weights"]


def test_all_weights_of_sdxl_fit_into_12_gb_and_those_of_flux_into_24():
    plans = planned_sizes.stored_full()
    assert set(plans) == set(planned_sizes.FULL_WEIGHTS)
    for title, card in (("SDXL", 12), ("Flux.1 dev", 24)):
        peak, blocks = sum(plans[title]["layers"].values()), plans[title]["blocks"]
        assert peak < 0.9 * card * GB < sum(plans[title]["on the card"].values())
        weights = planned_sizes.stored()[title]["1024"][planned_sizes.PLAIN]["weights"]
        assert 0.95 * weights < sum(blocks) <= weights  # trained in bf16, as the model is
