"""GraftRecipe: settings for a training, chosen from the model, a goal and the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy_api.latest import io

from .. import host
from .schema import Dataset, GraftNode, Settings, search_aliases

if TYPE_CHECKING:
    from ..host.comfyui_objects import Model
    from ..training.data.dataset import Dataset as TrainingData


class GraftRecipe(GraftNode):
    """Chooses adapter, optimizer, objective and EMA settings and says why."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftRecipe",
            display_name="Training Recipe",
            category="Graft/training",
            description=(
                "Chooses all training settings from the model, what you want to train and your memory, by the settings"
                " that kohya, AI-Toolkit and OneTrainer publish. The report says each choice and why."
            ),
            **search_aliases("preset", "defaults", "vram", "auto settings", "lora preset", "low memory"),
            inputs=[
                io.Model.Input("model", tooltip="The model to train. Its family and size decide most settings."),
                io.Combo.Input(
                    "goal",
                    display_name="goal",
                    options=["subject", "style", "concept", "as EveryDream2"],
                    default="subject",
                    tooltip=(
                        "What the LoRA should learn. subject: one person, animal or thing. style: how pictures look."
                        " concept: something broader that the model does not know; it gets twice the rank. as"
                        " EveryDream2: no LoRA, but full weights with the defaults of that trainer."
                    ),
                ),
                io.Combo.Input(
                    "memory",
                    display_name="memory",
                    options=["auto", "6 GB", "8 GB", "12 GB", "16 GB", "24 GB", "48 GB"],
                    default="auto",
                    tooltip=(
                        "The memory of the graphics card. auto: what is free now. Choose a size to get the same"
                        " settings each time, or to plan for another card."
                    ),
                ),
                io.Combo.Input(
                    "strength",
                    display_name="strength",
                    options=["light", "normal", "strong"],
                    default="normal",
                    tooltip=(
                        "How strongly to train: half, once or twice the published learning rate. light if the LoRA"
                        " overfits, strong if it learns too little."
                    ),
                ),
                io.Int.Input(
                    "steps",
                    display_name="steps",
                    default=2000,
                    min=1,
                    max=10_000_000,
                    tooltip=(
                        "How many steps you want to train. Set the same in Train Step. AI-Toolkit calls 500 to 4000 a"
                        " good range."
                    ),
                ),
                Dataset.Input(
                    "dataset",
                    optional=True,
                    tooltip=(
                        "Optional. The dataset to train on: memory is then counted for its image sizes and batch sizes."
                        " Without it, for the resolution that is published for the model."
                    ),
                ),
            ],
            outputs=[
                Settings.Output(display_name="GRAFT_SETTINGS"),
                io.String.Output(display_name="report"),
            ],
        )

    @classmethod
    def execute(
        cls,
        model: Model,
        goal: str = "subject",
        memory: str = "auto",
        strength: str = "normal",
        steps: int = 2000,
        dataset: TrainingData | None = None,
    ) -> io.NodeOutput:
        from ..host.device_memory import training_device
        from ..patches.models.registry import recognize_model
        from ..training.recipes.choose import AS_EVERYDREAM2, Wish, recipe
        from ..training.recipes.everydream2 import everydream2
        from ..training.recipes.facts import facts_of, pictures_of
        from ..training.recipes.report import report
        from ..training.settings import TrainingSettings

        wish = Wish(goal, memory, strength, steps)
        diffusion_model = model.model.diffusion_model
        prediction = host.model_sampling.prediction_type(model.get_model_object("model_sampling"))
        with host.whole_models.set_types(model):
            facts = facts_of(diffusion_model, recognize_model(diffusion_model), prediction)
        device = training_device(model)
        if goal == AS_EVERYDREAM2:
            return io.NodeOutput(*everydream2(facts, wish, device))
        pictures = pictures_of(dataset) if dataset is not None else ()
        chosen = recipe(facts, wish, device, pictures)
        text = report(chosen, facts, wish, device)
        settings = TrainingSettings(chosen.adapter, chosen.optimizer, chosen.objective, chosen.ema)
        return io.NodeOutput(settings, text)


NODES = [GraftRecipe]
