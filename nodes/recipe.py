"""GraftRecipe: settings for a training, chosen from the model, a goal and the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy_api.latest import io

from .. import host
from ..training.recipes.wish import AS_EVERYDREAM2, Wish
from .schema import Dataset, GraftNode, Settings, inputs_of, search_aliases

if TYPE_CHECKING:
    from ..host.comfyui_objects import Model
    from ..training.data.dataset import Dataset as TrainingData


class GraftRecipe(GraftNode):
    """Chooses adapter, optimizer, objective and EMA settings and says why."""

    settings_class = Wish

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftRecipe",
            display_name="Training Recipe",
            category="Graft/training",
            description=(
                "Chooses all training settings for your model, your goal and your memory, from the settings that"
                " kohya, AI-Toolkit and OneTrainer publish. The report lists each choice and the reason."
            ),
            **search_aliases("preset", "defaults", "vram", "auto settings", "lora preset", "low memory"),
            inputs=[
                io.Model.Input("model", tooltip="The model to train. Its family and size decide most settings."),
                *inputs_of(cls.settings_class),
                Dataset.Input(
                    "dataset",
                    optional=True,
                    tooltip=(
                        "Optional. The dataset to train on: memory is then planned for its image sizes and batch"
                        " sizes. Without it, memory is planned for the resolution that is published for the model."
                    ),
                ),
            ],
            outputs=[
                Settings.Output(display_name="GRAFT_SETTINGS"),
                io.String.Output(display_name="report"),
            ],
        )

    @classmethod
    def execute(cls, model: Model, chosen: Wish, dataset: TrainingData | None = None) -> io.NodeOutput:
        from ..host.device_memory import training_device
        from ..patches.models.registry import recognize_model
        from ..training.recipes.choose import recipe
        from ..training.recipes.everydream2 import everydream2
        from ..training.recipes.facts import facts_of, pictures_of
        from ..training.recipes.report import report
        from ..training.settings import TrainingSettings

        diffusion_model = model.model.diffusion_model
        prediction = host.model_sampling.prediction_type(model.get_model_object("model_sampling"))
        with host.whole_models.set_types(model):
            facts = facts_of(diffusion_model, recognize_model(diffusion_model), prediction)
        device = training_device(model)
        if chosen.goal == AS_EVERYDREAM2:
            return io.NodeOutput(*everydream2(facts, chosen, device))
        pictures = pictures_of(dataset) if dataset is not None else ()
        made = recipe(facts, chosen, device, pictures)
        settings = TrainingSettings(made.adapter, made.optimizer, made.objective, made.ema)
        return io.NodeOutput(settings, report(made, facts, chosen, device))


NODES = [GraftRecipe]
