"""Settings of training, one node each: what is trained, how it is stepped, what is minimised, and the average that is
kept.
"""

from __future__ import annotations

from comfy_api.latest import io

from ..ema import decay as averages
from ..training.objective import loss as objectives
from ..training.optimizers import settings as optimizers
from ..training.trainable import install
from .aliases import aliases
from .sockets import EMA, Adapter, LoraModel, Objective, Optimizer


class GraftAdapter(io.ComfyNode):
    """Settings: what is trained."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftAdapter",
            display_name="Adapter Settings",
            category="Graft/training",
            description=(
                "What is trained: an adapter (LoRA, LoCon, LoHa, LoKr, DoRA, OFT) or the full weights, and in which"
                " layers."
            ),
            **aliases("lora settings", "locon", "rank", "network dim", "full fine-tune"),
            inputs=[
                io.Combo.Input(
                    "kind",
                    options=["lora", "locon", "loha", "lokr", "dora", "oft", "full"],
                    default="lora",
                    tooltip=(
                        "lora: linear layers. locon: convolutions too. loha, lokr: products of factors. dora: a"
                        " magnitude a column. oft: rotates the weights. full: the weights themselves."
                    ),
                ),
                io.Int.Input(
                    "rank",
                    default=16,
                    min=1,
                    max=4096,
                    tooltip="Size of the factors (oft: of the blocks): more learns more and makes a larger file.",
                ),
                io.Float.Input(
                    "alpha",
                    default=0.0,
                    min=0.0,
                    max=4096.0,
                    step=0.5,
                    tooltip="The change is scaled by alpha / rank; 0 is rank, a scale of 1.",
                ),
                io.Combo.Input(
                    "targets",
                    options=list(install.TARGETS),
                    default="attention",
                    tooltip=(
                        "attention: its projections. attention+ff: feed-forward and the transformers' in and out"
                        " projections too. all: every layer."
                    ),
                ),
                io.String.Input(
                    "pattern",
                    default="",
                    tooltip=(
                        "Narrows the targets: globs (output_blocks.*) or /regular expressions/, with commas between; !"
                        " leaves out. input_blocks.*=rank 8, alpha 4 gives those layers a size of their own."
                    ),
                ),
                io.Boolean.Input(
                    "text_encoder",
                    default=False,
                    tooltip=(
                        "Train the text encoder too: the layers of it that targets and pattern choose. Connect clip to"
                        " Start Training."
                    ),
                ),
                io.Float.Input(
                    "rank_dropout",
                    default=0.0,
                    min=0.0,
                    max=0.99,
                    step=0.01,
                    tooltip="Share of the ranks left out, anew a picture.",
                ),
                io.Float.Input(
                    "module_dropout",
                    default=0.0,
                    min=0.0,
                    max=0.99,
                    step=0.01,
                    tooltip="Share of whole modules left out, anew a step.",
                ),
                io.Float.Input(
                    "network_dropout",
                    default=0.0,
                    min=0.0,
                    max=0.99,
                    step=0.01,
                    tooltip="Share of the inner activations left out.",
                ),
                io.Float.Input(
                    "max_norm",
                    default=0.0,
                    min=0.0,
                    max=1000.0,
                    step=0.1,
                    tooltip="Scales a layer's change down to this norm; 0 is off.",
                ),
                LoraModel.Input(
                    "initial", optional=True, tooltip="An adapter of the same kind, rank and layers to go on from."
                ),
            ],
            outputs=[Adapter.Output(display_name="GRAFT_ADAPTER")],
        )

    @classmethod
    def execute(
        cls,
        kind="lora",
        rank=16,
        alpha=0.0,
        targets="attention",
        pattern="",
        text_encoder=False,
        rank_dropout=0.0,
        module_dropout=0.0,
        network_dropout=0.0,
        max_norm=0.0,
        initial=None,
    ) -> io.NodeOutput:
        return io.NodeOutput(
            install.AdapterSettings(
                kind=kind,
                rank=rank,
                alpha=alpha,
                targets=targets,
                pattern=pattern,
                text_encoder=text_encoder,
                rank_dropout=rank_dropout,
                module_dropout=module_dropout,
                network_dropout=network_dropout,
                max_norm=max_norm,
                initial=initial,
            )
        )


class GraftOptimizer(io.ComfyNode):
    """Settings: how the trained weights move."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftOptimizer",
            display_name="Optimizer Settings",
            category="Graft/training",
            description="The optimizer and everything about a step: rate, schedule, batch, precision.",
            **aliases("learning rate", "adamw", "batch size", "lr schedule", "gradient accumulation"),
            inputs=[
                io.Combo.Input(
                    "optimizer",
                    options=list(optimizers.OPTIMIZERS),
                    default="adamw",
                    tooltip=(
                        "adamw, adafactor, muon, sgd, adacoor need nothing more; adamw8bit, lion, prodigy, schedulefree"
                        " a package."
                    ),
                ),
                io.Float.Input(
                    "learning_rate",
                    default=1e-4,
                    min=0.0,
                    max=10.0,
                    step=1e-6,
                    tooltip="1e-4 is a usual start for a LoRA, 1 for prodigy, 1e-5 for lion; adacoor ignores it.",
                ),
                io.Float.Input(
                    "text_encoder_rate",
                    default=0.0,
                    min=0.0,
                    max=10.0,
                    step=1e-6,
                    tooltip="Rate of the text encoder where it is trained; 0 is the same.",
                ),
                io.Combo.Input(
                    "schedule",
                    options=list(optimizers.SCHEDULES),
                    default="constant",
                    tooltip="The rate's course after the warm-up.",
                ),
                io.Int.Input(
                    "warmup", default=0, min=0, max=1_000_000, tooltip="Steps over which the rate rises from 0."
                ),
                io.Int.Input(
                    "total_steps",
                    default=1000,
                    min=1,
                    max=10_000_000,
                    tooltip=(
                        "The schedule's horizon: the steps of the whole run, however many Train Steps it is cut into."
                    ),
                ),
                io.Float.Input(
                    "floor",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Share of the rate that is left at the end of a falling schedule.",
                ),
                io.Int.Input("batch_size", default=1, min=1, max=4096, tooltip="Pictures in a batch."),
                io.Int.Input("accumulation", default=1, min=1, max=4096, tooltip="Batches in a step."),
                io.Float.Input(
                    "clip_norm",
                    default=1.0,
                    min=0.0,
                    max=1000.0,
                    step=0.1,
                    tooltip="Largest norm of the whole gradient; 0 is off.",
                ),
                io.Float.Input(
                    "weight_decay",
                    default=0.01,
                    min=0.0,
                    max=10.0,
                    step=0.0001,
                    tooltip="How strongly weights are pulled to 0 (not by adacoor).",
                ),
                io.Float.Input(
                    "lora_plus",
                    default=1.0,
                    min=0.01,
                    max=1000.0,
                    step=0.1,
                    tooltip="Rate of the up factors as a multiple (LoRA+); 1 is off.",
                ),
                io.Combo.Input(
                    "precision",
                    options=["auto", "float32", "bf16", "fp16", "full-bf16"],
                    default="auto",
                    tooltip=(
                        "auto: bf16 on a GPU that has it, else as the model is. bf16, fp16: computed in it, trained in"
                        " float32. full-bf16: trained weights and gradients too, rounded stochastically."
                    ),
                ),
                io.Boolean.Input(
                    "checkpointing",
                    default=False,
                    tooltip="Compute activations again in the backward pass: less memory, more time, the same result.",
                ),
                io.Combo.Input(
                    "offload",
                    options=["none", "activations", "optimizer", "layers"],
                    default="none",
                    tooltip=(
                        "What waits in host memory on a GPU: less of its memory, more time, the same result."
                        " activations: what the backward pass needs; optimizer: its state; layers: the frozen model's"
                        " weights (with checkpointing)."
                    ),
                ),
                io.Boolean.Input(
                    "scale_lr", default=False, tooltip="Multiply the rate by (batch x accumulation)^0.55."
                ),
                io.String.Input(
                    "block_rates",
                    default="",
                    optional=True,
                    tooltip=(
                        "Rates of blocks as multiples: pattern = number, with commas between, as in input_blocks.* ="
                        " 0.5. Patterns as in Adapter Settings."
                    ),
                ),
                io.Boolean.Input(
                    "fused_backward",
                    default=False,
                    optional=True,
                    tooltip=(
                        "Move each weight as soon as its gradient is there and drop the gradient: less memory with full"
                        " weights, the same result. Not with clip_norm or accumulation."
                    ),
                ),
                io.String.Input(
                    "options",
                    default="",
                    optional=True,
                    tooltip=(
                        "Options of the optimizer's library: name = value, with commas between, as in betas = 0.9 0.99,"
                        " eps = 1e-8. Which there are is on the help page."
                    ),
                ),
            ],
            outputs=[Optimizer.Output(display_name="GRAFT_OPTIMIZER")],
        )

    @classmethod
    def execute(cls, **settings) -> io.NodeOutput:
        return io.NodeOutput(optimizers.OptimizerSettings(**settings))


class GraftObjective(io.ComfyNode):
    """Settings: what training minimises."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftObjective",
            display_name="Objective Settings",
            category="Graft/training",
            description="What the model is asked to learn: loss, weighting, noise and timesteps.",
            **aliases("loss", "min snr", "offset noise", "timestep", "huber", "prior preservation"),
            inputs=[
                io.Combo.Input(
                    "loss",
                    options=list(objectives.LOSSES),
                    default="mse",
                    tooltip=(
                        "On the model's own objective (noise, velocity or flow); scheduled-huber: by noise level; "
                        "x0-mse is the loss of ComfyUI's own trainer."
                    ),
                ),
                io.Combo.Input(
                    "weighting",
                    options=list(objectives.WEIGHTINGS),
                    default="none",
                    tooltip="How noise levels are weighted; not for flow models.",
                ),
                io.Float.Input("gamma", default=5.0, min=0.01, max=1000.0, step=0.1, tooltip="The cap of min-snr."),
                io.Float.Input(
                    "offset_noise",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Noise that is the same everywhere in a channel.",
                ),
                io.Float.Input(
                    "pyramid_noise",
                    default=0.0,
                    min=0.0,
                    max=0.99,
                    step=0.01,
                    tooltip="Coarser noise, each level weaker by this factor.",
                ),
                io.Float.Input(
                    "ip_noise",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="Input perturbation: noise that the model sees and is not asked for; 0.1 is usual.",
                ),
                io.Boolean.Input(
                    "zero_terminal_snr",
                    default=False,
                    tooltip=(
                        "No signal at the last timestep. For v models only; MODEL samples so too. Elsewhere:"
                        " ModelSamplingDiscrete with zsnr on."
                    ),
                ),
                io.Combo.Input(
                    "timesteps",
                    options=list(objectives.TIMESTEPS),
                    default="uniform",
                    tooltip="Where on the noise schedule to train.",
                ),
                io.Float.Input(
                    "shift",
                    default=1.0,
                    min=0.01,
                    max=100.0,
                    step=0.1,
                    tooltip="For timesteps shifted: above 1 is noisier.",
                ),
                io.Float.Input(
                    "conditioning_dropout",
                    default=0.05,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="How often a picture is trained with the empty prompt, which guidance needs.",
                ),
                io.Combo.Input(
                    "prior",
                    options=list(objectives.PRIORS),
                    default="none",
                    tooltip=(
                        "none: regularisation pictures count like the others. regularisation: with prior_weight. "
                        "output-preservation: for them the model is to say what it said before training."
                    ),
                ),
                io.Float.Input(
                    "prior_weight",
                    default=1.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    tooltip="Weight of regularisation pictures.",
                ),
                io.Float.Input(
                    "min_timestep",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    tooltip=(
                        "Least noise that is trained, as a share of the schedule: above 0 leaves fine detail alone."
                    ),
                ),
                io.Float.Input(
                    "max_timestep",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    tooltip="Most noise that is trained, as a share of the schedule: below 1 leaves the layout alone.",
                ),
            ],
            outputs=[Objective.Output(display_name="GRAFT_OBJECTIVE")],
        )

    @classmethod
    def execute(cls, **settings) -> io.NodeOutput:
        return io.NodeOutput(objectives.ObjectiveSettings(**settings))


class GraftEMA(io.ComfyNode):
    """Settings: the running average of the trained weights."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftEMA",
            display_name="EMA Settings",
            category="Graft/training",
            description=(
                "A running average of the trained weights: usually better than the last step, and always calmer."
            ),
            **aliases("ema", "exponential moving average", "weight averaging", "polyak"),
            inputs=[
                io.Combo.Input(
                    "schedule",
                    options=list(averages.SCHEDULES),
                    default="constant",
                    tooltip=(
                        "constant; ramp min(decay, (1+n)/(10+n)); warmup 1-(1+n/inv_gamma)^-power; power: Karras 2024,"
                        " of the first width; target: that share of the start is left after total_steps."
                    ),
                ),
                io.Float.Input(
                    "decay",
                    default=0.999,
                    min=0.0,
                    max=0.999999,
                    step=0.0001,
                    tooltip="How much of the average stays at each step.",
                ),
                io.Float.Input(
                    "inv_gamma", default=1.0, min=0.001, max=10000.0, step=0.1, tooltip="Of warmup: larger is slower."
                ),
                io.Float.Input(
                    "power", default=0.6667, min=0.001, max=10.0, step=0.0001, tooltip="Of warmup: larger is faster."
                ),
                io.Float.Input(
                    "target",
                    default=0.1,
                    min=0.0001,
                    max=0.9999,
                    step=0.01,
                    tooltip="Of target: share of the start at the end.",
                ),
                io.Int.Input(
                    "interval",
                    default=1,
                    min=1,
                    max=100000,
                    tooltip="Update every N steps; the decay is raised to the N-th power.",
                ),
                io.Combo.Input(
                    "device", options=["same", "host"], default="same", tooltip="Beside the weights or in host memory."
                ),
                io.Int.Input(
                    "snapshots",
                    default=0,
                    min=0,
                    max=1_000_000,
                    tooltip=(
                        "Every N steps keep an average of each width on disk; EMA Merge makes any width from them. 0 is"
                        " never."
                    ),
                ),
                io.String.Input(
                    "widths",
                    default="0.05 0.10",
                    tooltip=(
                        "Relative widths of the snapshots' power-function averages; schedule power follows the first."
                    ),
                ),
                io.Int.Input(
                    "switch_every",
                    default=0,
                    min=0,
                    max=1_000_000,
                    tooltip="Set the weights to the average every N steps and train on from there; 0 is never.",
                ),
            ],
            outputs=[EMA.Output(display_name="GRAFT_EMA")],
        )

    @classmethod
    def execute(cls, widths="0.05 0.10", **settings) -> io.NodeOutput:
        return io.NodeOutput(averages.EMASettings(widths=averages.parse_widths(widths), **settings))


NODES = [GraftAdapter, GraftOptimizer, GraftObjective, GraftEMA]
