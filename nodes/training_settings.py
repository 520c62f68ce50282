"""Nodes for the training settings: adapter, optimizer, objective and EMA."""

from __future__ import annotations

from comfy_api.latest import io

from ..ema import decay as averages
from ..patches.adapters.registry import trainable_kinds, trainable_names
from ..training.objective import settings as objectives
from ..training.optimizers import settings as optimizers
from ..training.optimizers.registry import OPTIMIZERS
from ..training.trainable.settings import AS_LOADED, BASE_WEIGHTS, TARGETS, AdapterSettings
from .refusals import refusal
from .schema import EMA, Adapter, LoraModel, Objective, Optimizer, Words, advanced, aliases


class GraftAdapter(io.ComfyNode):
    """Settings: what is trained."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftAdapter",
            display_name="Adapter Settings",
            category="Graft/training",
            description=(
                "What to train: an adapter (LoRA, LoCon, LoHa, LoKr, DoRA, OFT, T-LoRA) or the full weights, and"
                " in which layers."
            ),
            **aliases("lora settings", "locon", "rank", "network dim", "full fine-tune"),
            inputs=[
                io.Combo.Input(
                    "kind",
                    display_name="adapter type",
                    options=list(trainable_names()),
                    default="lora",
                    tooltip="".join(f"{kind.name}: {kind.help}. " for kind in trainable_kinds()) + "Start with lora.",
                ),
                io.Int.Input(
                    "rank",
                    display_name="rank (dim)",
                    default=16,
                    min=1,
                    max=4096,
                    tooltip=(
                        "The rank of the matrices, network_dim in kohya's scripts (for oft, the block size)."
                        " Raise it to learn more and get a larger file; lower it if the LoRA overfits."
                    ),
                ),
                io.Float.Input(
                    "alpha",
                    display_name="alpha",
                    default=0.0,
                    min=0.0,
                    max=4096.0,
                    step=0.5,
                    tooltip=(
                        "The LoRA is scaled by alpha / rank. 0 means alpha = rank, a scale of 1. Set it to half"
                        " the rank for a gentler start."
                    ),
                ),
                io.Combo.Input(
                    "targets",
                    display_name="target layers",
                    options=list(TARGETS),
                    default="attention",
                    tooltip=(
                        "Which layers to train. attention: the attention projections. attention+ff: also"
                        " feed-forward layers and the transformers' in and out projections. all: every layer. Go"
                        " from attention to all if the LoRA learns too little."
                    ),
                ),
                advanced(
                    io.String,
                    "pattern",
                    display_name="layer filter",
                    default="",
                    tooltip=(
                        "Limits training to layers whose path matches: globs (output_blocks.*) or /regular"
                        " expressions/, separated by commas; ! excludes. input_blocks.*=rank 8, alpha 4 gives"
                        " those layers a rank and alpha of their own. Empty takes all target layers."
                    ),
                ),
                io.Boolean.Input(
                    "text_encoder",
                    display_name="train text encoder",
                    default=False,
                    tooltip=(
                        "Also trains the text encoder, in the layers that target layers and layer filter choose."
                        " Connect CLIP to Start Training."
                    ),
                ),
                advanced(
                    io.Float,
                    "rank_dropout",
                    display_name="rank dropout",
                    default=0.0,
                    min=0.0,
                    max=0.99,
                    step=0.01,
                    tooltip=(
                        "Randomly drops this fraction of the rank dimensions for each image. Try 0.1 if the LoRA"
                        " overfits."
                    ),
                ),
                advanced(
                    io.Float,
                    "module_dropout",
                    display_name="module dropout",
                    default=0.0,
                    min=0.0,
                    max=0.99,
                    step=0.01,
                    tooltip=(
                        "Randomly skips this fraction of the trained layers at each step. Try 0.1 if the LoRA overfits."
                    ),
                ),
                advanced(
                    io.Float,
                    "network_dropout",
                    display_name="network dropout",
                    default=0.0,
                    min=0.0,
                    max=0.99,
                    step=0.01,
                    tooltip=(
                        "Randomly zeroes this fraction of the activations inside the LoRA. Try 0.1 if the LoRA"
                        " overfits."
                    ),
                ),
                advanced(
                    io.Float,
                    "max_norm",
                    display_name="maximum weight norm",
                    default=0.0,
                    min=0.0,
                    max=1000.0,
                    step=0.1,
                    tooltip=(
                        "Scales a layer's change down when its norm grows above this (kohya's"
                        " scale_weight_norms). Try 1 if some layers overbake; 0 is off."
                    ),
                ),
                LoraModel.Input(
                    "initial",
                    optional=True,
                    tooltip="Optional. A LoRA of the same type, rank and layers to continue from.",
                ),
                advanced(
                    io.Int,
                    "min_rank",
                    display_name="smallest rank",
                    optional=True,
                    default=0,
                    min=0,
                    max=4096,
                    tooltip=(
                        "T-LoRA (tlora) only: how many ranks work on pure noise; towards a finished image all do. 0 is"
                        " half the rank. Set it lower, down to 1, if the LoRA copies the training images' composition."
                    ),
                ),
                advanced(
                    io.Float,
                    "rank_exponent",
                    display_name="rank exponent",
                    optional=True,
                    default=1.0,
                    min=0.01,
                    max=100.0,
                    step=0.1,
                    tooltip=(
                        "T-LoRA (tlora) only: how the ranks grow as noise goes (the authors' alpha_rank_scale). 1 is"
                        " evenly; above 1 they come later."
                    ),
                ),
                advanced(
                    io.Combo,
                    "base_weights",
                    display_name="base weights",
                    optional=True,
                    options=list(BASE_WEIGHTS),
                    default=AS_LOADED,
                    tooltip=(
                        "How the model's linear layers are kept while training, the adapter in full precision. int8:"
                        " they multiply in int8 (W8A8). int8 weight-only, nf4 (QLoRA): they are unpacked to multiply."
                        " int8 takes half of bf16's memory on a graphics card, nf4 28%. Previews and validation use"
                        " the weights as loaded. Not with adapter type full."
                    ),
                ),
            ],
            outputs=[Adapter.Output(display_name="GRAFT_ADAPTER")],
        )

    @classmethod
    def validate_inputs(
        cls,
        kind=None,
        alpha=None,
        pattern=None,
        rank_dropout=None,
        module_dropout=None,
        network_dropout=None,
        max_norm=None,
        min_rank=None,
        rank_exponent=None,
        base_weights=None,
    ) -> bool | str:
        return refusal(
            cls,
            AdapterSettings,
            ("kind",),
            ("pattern",),
            kind=kind,
            alpha=alpha,
            pattern=pattern,
            rank_dropout=rank_dropout,
            module_dropout=module_dropout,
            network_dropout=network_dropout,
            max_norm=max_norm,
            rank_exponent=rank_exponent,
            base_weights=base_weights,
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
        min_rank=0,
        rank_exponent=1.0,
        base_weights=AS_LOADED,
    ) -> io.NodeOutput:
        return io.NodeOutput(
            AdapterSettings(
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
                min_rank=min_rank,
                rank_exponent=rank_exponent,
                base_weights=base_weights,
            )
        )


class GraftWords(io.ComfyNode):
    """Settings: words that are trained."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftWords",
            display_name="Train Words",
            category="Graft/training",
            description=(
                "Trains words (textual inversion): where a caption has the word, the text encoder reads a few trained"
                " vectors. With an adapter beside it, it is pivotal tuning."
            ),
            **aliases("textual inversion", "embedding", "pivotal tuning", "new token", "trigger word"),
            inputs=[
                io.String.Input(
                    "words",
                    display_name="words",
                    default="",
                    multiline=True,
                    tooltip=(
                        "The words to train, one per line or separated by commas, as your captions have them: sks_cat."
                        " Take words that mean nothing yet."
                    ),
                ),
                io.String.Input(
                    "initial",
                    display_name="initial words",
                    default="",
                    multiline=True,
                    tooltip=(
                        "What each word starts from: cat. One entry for each word, in the same order, or one for all."
                        " The nearer it is, the fewer steps it takes."
                    ),
                ),
                io.Int.Input(
                    "count",
                    display_name="vectors per word",
                    default=0,
                    min=0,
                    max=64,
                    tooltip=(
                        "How many vectors a word has: 2 to 8 hold more detail. 0: as many as the initial words have"
                        " tokens. With another number these are repeated or cut off."
                    ),
                ),
                io.Float.Input(
                    "learning_rate",
                    display_name="learning rate",
                    default=0.001,
                    min=0.0,
                    max=10.0,
                    step=1e-6,
                    tooltip=(
                        "How fast the words move, with the schedule of Optimizer Settings. Words need more than a LoRA:"
                        " 0.0005 to 0.005. 0 uses the learning rate of Optimizer Settings."
                    ),
                ),
                advanced(
                    io.Float,
                    "stop_after",
                    display_name="stop after (share of steps)",
                    default=1.0,
                    min=0.01,
                    max=1.0,
                    step=0.05,
                    tooltip=(
                        "Freezes the words after this share of the total steps; the adapter goes on. Try 0.5 if the"
                        " words take over. 1 never freezes them."
                    ),
                ),
                advanced(
                    io.Float,
                    "max_norm",
                    display_name="maximum norm",
                    default=2.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    tooltip=(
                        "No vector grows longer than this many times the mean of the text encoder's own. Lower it to 1"
                        " if the word drowns the rest of the prompt; 0 is off."
                    ),
                ),
                io.Boolean.Input(
                    "alone",
                    display_name="words only",
                    default=False,
                    tooltip="Trains the words and nothing else. Disconnect Adapter Settings then.",
                ),
            ],
            outputs=[Words.Output(display_name="GRAFT_WORDS")],
        )

    @classmethod
    def validate_inputs(
        cls, words=None, initial=None, count=None, learning_rate=None, stop_after=None, max_norm=None, alone=None
    ) -> bool | str:
        from ..training.trainable.words import WordSettings

        return refusal(
            cls,
            WordSettings.read,
            words=words,
            initial=initial,
            count=count,
            learning_rate=learning_rate,
            stop_after=stop_after,
            max_norm=max_norm,
            alone=alone,
        )

    @classmethod
    def execute(
        cls, words="", initial="", count=0, learning_rate=0.001, stop_after=1.0, max_norm=2.0, alone=False
    ) -> io.NodeOutput:
        from ..training.trainable.words import WordSettings

        return io.NodeOutput(
            WordSettings.read(
                words,
                initial,
                count=count,
                learning_rate=learning_rate,
                stop_after=stop_after,
                max_norm=max_norm,
                alone=alone,
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
            description=("The optimizer and its learning rate, schedule, batch size, precision and memory settings."),
            **aliases("learning rate", "adamw", "batch size", "lr schedule", "gradient accumulation"),
            inputs=[
                io.Combo.Input(
                    "optimizer",
                    display_name="optimizer",
                    options=OPTIMIZERS.names(),
                    default="adamw",
                    tooltip=" ".join(record.tooltip for record in OPTIMIZERS) + " Start with adamw.",
                ),
                io.Float.Input(
                    "learning_rate",
                    display_name="learning rate",
                    default=1e-4,
                    min=0.0,
                    max=10.0,
                    step=1e-6,
                    tooltip=(
                        "How large each step is. Start at 1e-4 for a LoRA, 1 with prodigy and prodigyplus, 1e-5 with"
                        " lion, 0.01 with adafactor, 1e-6 with automagic, 0.1 with sgd. Lower it if the loss jumps or"
                        " the LoRA overfits. adacoor ignores it."
                    ),
                ),
                advanced(
                    io.Float,
                    "text_encoder_rate",
                    display_name="text encoder learning rate",
                    default=0.0,
                    min=0.0,
                    max=10.0,
                    step=1e-6,
                    tooltip=(
                        "Learning rate of the text encoder, if you train it. Often half of the main one; 0 uses"
                        " the same."
                    ),
                ),
                io.Combo.Input(
                    "schedule",
                    display_name="learning rate schedule",
                    options=list(optimizers.SCHEDULES),
                    default="constant",
                    tooltip=(
                        "How the learning rate changes after the warmup. constant keeps it; cosine and linear"
                        " let it fall toward the end, which often gives cleaner results."
                    ),
                ),
                advanced(
                    io.Int,
                    "warmup",
                    display_name="warmup steps",
                    default=0,
                    min=0,
                    max=1_000_000,
                    tooltip=(
                        "Raises the learning rate from 0 over this many steps. Try 100 if the loss jumps at the start."
                    ),
                ),
                io.Int.Input(
                    "total_steps",
                    display_name="total steps (schedule)",
                    default=1000,
                    min=0,
                    max=10_000_000,
                    tooltip=(
                        "The length of the learning rate schedule: the steps of the whole run, even if you split"
                        " it over several Train Steps. 0: up to the last step of each Train Step; more steps then"
                        " begin anew."
                    ),
                ),
                advanced(
                    io.Float,
                    "floor",
                    display_name="minimum learning rate ratio",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip=(
                        "The learning rate at the end of a falling schedule, as a fraction of the learning rate."
                        " 0 falls to nothing; try 0.1 to keep learning until the end."
                    ),
                ),
                io.Int.Input(
                    "batch_size",
                    display_name="batch size",
                    default=1,
                    min=1,
                    max=4096,
                    tooltip="Images per batch. Raise it for a steadier loss if the memory allows.",
                ),
                advanced(
                    io.Int,
                    "accumulation",
                    display_name="gradient accumulation",
                    default=1,
                    min=1,
                    max=4096,
                    tooltip="Batches per step. Raise it to act like a larger batch size without more memory.",
                ),
                advanced(
                    io.Float,
                    "clip_norm",
                    display_name="maximum gradient norm",
                    default=1.0,
                    min=0.0,
                    max=1000.0,
                    step=0.1,
                    tooltip=(
                        "Clips the gradient to this norm (kohya's max_grad_norm). Lower it if the loss spikes; 0"
                        " is off."
                    ),
                ),
                advanced(
                    io.Float,
                    "weight_decay",
                    display_name="weight decay",
                    default=0.01,
                    min=0.0,
                    max=10.0,
                    step=0.0001,
                    tooltip=(
                        "Pulls the weights toward 0 at each step. Raise it from 0.01 to 0.1 if the LoRA"
                        " overfits. adacoor ignores it."
                    ),
                ),
                advanced(
                    io.Float,
                    "lora_plus",
                    display_name="LoRA+ ratio",
                    default=1.0,
                    min=0.01,
                    max=1000.0,
                    step=0.1,
                    tooltip=(
                        "Multiplies the learning rate of the up matrices (LoRA+). Try 4 to 16 to learn faster; 1"
                        " is off."
                    ),
                ),
                advanced(
                    io.Combo,
                    "precision",
                    display_name="training precision",
                    options=list(optimizers.PRECISIONS),
                    default="auto",
                    tooltip=(
                        "auto: bf16 on an NVIDIA or AMD card that computes it, fp16 on an older one, else the model's"
                        " own type. bf16, fp16: compute in it, keep the trained weights in float32. full-bf16:"
                        " trained weights and gradients are bf16 too, rounded stochastically, to save memory."
                    ),
                ),
                io.Boolean.Input(
                    "checkpointing",
                    display_name="gradient checkpointing",
                    default=False,
                    tooltip=(
                        "Recomputes activations in the backward pass. Switch it on if memory runs out: slower,"
                        " same result."
                    ),
                ),
                advanced(
                    io.Combo,
                    "offload",
                    display_name="offload to CPU memory",
                    options=list(optimizers.OFFLOADS),
                    default="none",
                    tooltip=(
                        "What to keep in CPU memory when you train on a GPU. activations: what the backward pass"
                        " needs. optimizer: the optimizer state. layers: the frozen model weights (use it with"
                        " gradient checkpointing). Saves GPU memory; slower, same result."
                    ),
                ),
                advanced(
                    io.Boolean,
                    "scale_lr",
                    display_name="scale rate with batch size",
                    default=False,
                    tooltip=(
                        "Multiplies the learning rate by (batch size x accumulation)^0.55. Switch it on to keep"
                        " one learning rate for all batch sizes."
                    ),
                ),
                advanced(
                    io.String,
                    "block_rates",
                    display_name="block learning rates",
                    default="",
                    optional=True,
                    tooltip=(
                        "Multiplies the learning rate of some blocks: pattern = number, separated by commas, as"
                        " in input_blocks.* = 0.5. Patterns work as in Adapter Settings. Empty uses one rate."
                    ),
                ),
                advanced(
                    io.Boolean,
                    "fused_backward",
                    display_name="fused backward pass",
                    default=False,
                    optional=True,
                    tooltip=(
                        "Updates each weight as soon as its gradient is there and frees the gradient. Saves"
                        " memory with full weights; same result. Needs maximum gradient norm 0 and no gradient"
                        " accumulation."
                    ),
                ),
                advanced(
                    io.String,
                    "options",
                    display_name="optimizer options",
                    default="",
                    optional=True,
                    tooltip=(
                        "Extra options of the optimizer (kohya's optimizer_args): name = value, separated by"
                        " commas, as in betas = 0.9 0.99, eps = 1e-8. The help page lists them."
                    ),
                ),
                advanced(
                    io.Combo,
                    "compile",
                    display_name="compile",
                    options=list(optimizers.COMPILED),
                    default="off",
                    optional=True,
                    tooltip=(
                        "blocks: torch.compile compiles each kind of block of the model before the first step. That"
                        " takes up to some minutes; steps are somewhat faster then. Try it for long runs. Needs"
                        " Triton on a GPU, a C++ compiler on the CPU."
                    ),
                ),
            ],
            outputs=[Optimizer.Output(display_name="GRAFT_OPTIMIZER")],
        )

    @classmethod
    def validate_inputs(
        cls,
        optimizer=None,
        learning_rate=None,
        text_encoder_rate=None,
        schedule=None,
        warmup=None,
        total_steps=None,
        floor=None,
        accumulation=None,
        clip_norm=None,
        weight_decay=None,
        lora_plus=None,
        precision=None,
        scale_lr=None,
        block_rates=None,
        fused_backward=None,
        options=None,
    ) -> bool | str:
        return refusal(
            cls,
            _usable_optimizer,
            ("learning_rate",),
            ("block_rates",),
            ("optimizer", "options"),
            ("optimizer",),
            _OF_RATES,
            ("precision",),
            ("schedule", "floor"),
            ("warmup", "total_steps"),
            ("fused_backward", "clip_norm", "accumulation"),
            optimizer=optimizer,
            learning_rate=learning_rate,
            text_encoder_rate=text_encoder_rate,
            schedule=schedule,
            warmup=warmup,
            total_steps=total_steps,
            floor=floor,
            accumulation=accumulation,
            clip_norm=clip_norm,
            weight_decay=weight_decay,
            lora_plus=lora_plus,
            precision=precision,
            scale_lr=scale_lr,
            block_rates=block_rates,
            fused_backward=fused_backward,
            options=options,
        )

    @classmethod
    def execute(cls, **settings) -> io.NodeOutput:
        return io.NodeOutput(optimizers.OptimizerSettings(**settings))


_OF_RATES = (  # what decides whether a run can learn at all
    "optimizer",
    "options",
    "learning_rate",
    "text_encoder_rate",
    "block_rates",
    "lora_plus",
    "scale_lr",
    "clip_norm",
)


def _usable_optimizer(**settings) -> None:
    """Raises ValueError for settings that are wrong, for an optimizer that is not installed, and for a learning rate at
    which no run learns anything.
    """
    from ..training.optimizers.build import check_installed
    from ..training.optimizers.checks import check_rate

    made = optimizers.OptimizerSettings(**settings)
    check_installed(made.optimizer)
    if "learning_rate" in settings and not made.scale_lr:  # whose batch size only the run knows
        check_rate(made)


class GraftObjective(io.ComfyNode):
    """Settings: what training minimises."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GraftObjective",
            display_name="Objective Settings",
            category="Graft/training",
            description=(
                "What the model learns to predict: loss, loss weighting, noise and timesteps. The"
                " defaults suit most LoRAs."
            ),
            **aliases("loss", "min snr", "offset noise", "timestep", "huber", "prior preservation"),
            inputs=[
                io.Combo.Input(
                    "loss",
                    display_name="loss function",
                    options=objectives.LOSSES.names(),
                    default="mse",
                    tooltip=(
                        "How the error of a prediction (noise, velocity or flow) is measured. mse is usual."
                        " huber, smooth-l1 and scheduled-huber care less about outliers; scheduled-huber adapts"
                        " to the noise level. x0-mse is the loss of ComfyUI's own trainer. dpo teaches what you prefer,"
                        " from pairs of images: name.win.png and name.lose.png in Dataset's folder."
                    ),
                ),
                io.Combo.Input(
                    "weighting",
                    display_name="loss weighting",
                    options=objectives.WEIGHTINGS.names(),
                    default="none",
                    tooltip=(
                        "How much each noise level counts. Try min-snr for faster, steadier training of SD1.x"
                        " and SDXL. Not for flow models, which ai-toolkit weighted is for."
                    ),
                ),
                advanced(
                    io.Float,
                    "gamma",
                    display_name="min-SNR gamma",
                    default=5.0,
                    min=0.01,
                    max=1000.0,
                    step=0.1,
                    tooltip=(
                        "The cap of the min-snr weighting. 5 is usual; lower it to give low noise levels less weight."
                    ),
                ),
                advanced(
                    io.Float,
                    "offset_noise",
                    display_name="noise offset",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip=(
                        "Adds noise that is the same everywhere in a channel. Try 0.05 to 0.1 for very dark or"
                        " very bright images; 0 is off."
                    ),
                ),
                advanced(
                    io.Float,
                    "pyramid_noise",
                    display_name="pyramid noise discount",
                    default=0.0,
                    min=0.0,
                    max=0.99,
                    step=0.01,
                    tooltip=(
                        "Adds coarser layers of noise, each weaker by this factor (kohya's"
                        " multires_noise_discount). Try 0.3 for very dark or bright images; 0 is off."
                    ),
                ),
                advanced(
                    io.Float,
                    "ip_noise",
                    display_name="input perturbation",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip=(
                        "Adds noise that the model sees but does not have to predict (kohya's ip_noise_gamma)."
                        " Try 0.1 to make sampling more robust; 0 is off."
                    ),
                ),
                advanced(
                    io.Boolean,
                    "zero_terminal_snr",
                    display_name="zero terminal SNR",
                    default=False,
                    tooltip=(
                        "Trains the last timestep on pure noise, for images that are all dark or all bright."
                        " Only for v-prediction models. The MODEL output samples that way too; elsewhere add"
                        " ModelSamplingDiscrete with zsnr on."
                    ),
                ),
                io.Combo.Input(
                    "timesteps",
                    display_name="timestep sampling",
                    options=objectives.TIMESTEPS.names(),
                    default="uniform",
                    tooltip=(
                        "Which noise levels are trained more often. uniform: all alike. logit-normal, mode: the middle"
                        " ones. shifted: see timestep shift. All on top of a flow model's own shift, which already"
                        " favors noise: half of uniform is above 0.75 on SD 3. sigmoid, shift, flux_shift: kohya's,"
                        " without it; AI-Toolkit's shifts have its name."
                    ),
                ),
                io.Float.Input(
                    "shift",
                    display_name="timestep shift",
                    default=1.0,
                    min=0.01,
                    max=100.0,
                    step=0.1,
                    tooltip=(
                        "For timestep sampling shifted, shift (kohya's discrete_flow_shift) and ai-toolkit shift. Above"
                        " 1 trains high noise (layout) more, below 1 low noise (detail)."
                    ),
                ),
                io.Float.Input(
                    "conditioning_dropout",
                    display_name="conditioning dropout",
                    default=0.05,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip=(
                        "How often an image is trained with an empty prompt, which CFG needs. 0.05 to 0.1 is usual."
                    ),
                ),
                advanced(
                    io.Combo,
                    "prior",
                    display_name="prior preservation",
                    options=list(objectives.PRIORS),
                    default="none",
                    tooltip=(
                        "How regularization images count. none: like all others. regularisation: with the prior"
                        " loss weight. output-preservation: the model learns to answer for them as it did before"
                        " training."
                    ),
                ),
                advanced(
                    io.Float,
                    "prior_weight",
                    display_name="prior loss weight",
                    default=1.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    tooltip=(
                        "Weight of the regularization images in the loss. Raise it if the model forgets, lower"
                        " it if the LoRA learns too little."
                    ),
                ),
                advanced(
                    io.Float,
                    "min_timestep",
                    display_name="minimum timestep",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    tooltip=(
                        "The lowest noise level to train, as a fraction of the schedule. Raise it to leave fine"
                        " detail alone."
                    ),
                ),
                advanced(
                    io.Float,
                    "max_timestep",
                    display_name="maximum timestep",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    tooltip=(
                        "The highest noise level to train, as a fraction of the schedule. Lower it to leave the"
                        " layout alone."
                    ),
                ),
                advanced(
                    io.Float,
                    "sigmoid_scale",
                    display_name="sigmoid scale",
                    default=1.0,
                    min=0.01,
                    max=100.0,
                    step=0.1,
                    optional=True,
                    tooltip=(
                        "For timestep sampling sigmoid, shift and flux_shift (kohya's sigmoid_scale). Raise it to"
                        " spread the noise levels."
                    ),
                ),
                advanced(
                    io.Float,
                    "logit_mean",
                    display_name="logit mean",
                    default=0.0,
                    min=-10.0,
                    max=10.0,
                    step=0.1,
                    optional=True,
                    tooltip=(
                        "For timestep sampling logit-normal. Above 0 trains high noise more, below 0 low noise"
                        " (kohya's logit_mean with the other sign)."
                    ),
                ),
                advanced(
                    io.Float,
                    "logit_std",
                    display_name="logit deviation",
                    default=1.0,
                    min=0.01,
                    max=10.0,
                    step=0.1,
                    optional=True,
                    tooltip=(
                        "For timestep sampling logit-normal (kohya's logit_std). Lower it to train the middle noise"
                        " levels even more."
                    ),
                ),
                advanced(
                    io.Float,
                    "mode_scale",
                    display_name="mode scale",
                    default=1.29,
                    min=-1.0,
                    max=1.75,
                    step=0.01,
                    optional=True,
                    tooltip=(
                        "For timestep sampling mode (kohya's mode_scale). Raise it to train the middle noise levels"
                        " more; below 0 trains both ends more."
                    ),
                ),
                advanced(
                    io.Boolean,
                    "model_shift",
                    display_name="model's own shift",
                    default=True,
                    optional=True,
                    tooltip=(
                        "For flow models. On: timesteps come on top of the shift that the model samples with. Off:"
                        " they are the sampler's noise levels (sigma) themselves, minimum and maximum too."
                    ),
                ),
                advanced(
                    io.Combo,
                    "expert",
                    display_name="expert",
                    options=list(objectives.EXPERTS),
                    default=objectives.NO_EXPERT,
                    optional=True,
                    tooltip=(
                        "For Wan 2.2 14B, which is two models: which of them is trained. It gets only the noise levels"
                        " that the sampler gives it. both: in one run, with the other on Start Training's low noise"
                        " model. none for every other model."
                    ),
                ),
                advanced(
                    io.Float,
                    "boundary",
                    display_name="expert boundary",
                    default=0.0,
                    min=0.0,
                    max=0.999,
                    step=0.005,
                    optional=True,
                    tooltip=(
                        "For expert: the noise level (sigma) at which the sampler goes from the high-noise model to the"
                        " low-noise one. 0 is the model's own: 0.875 for text to video, 0.9 for image to video."
                    ),
                ),
                advanced(
                    io.Float,
                    "beta",
                    display_name="DPO beta",
                    default=2000.0,
                    min=0.01,
                    max=1000000.0,
                    step=100.0,
                    optional=True,
                    tooltip=(
                        "For loss function dpo: how firmly it holds on to the model as it was. 2000 (SD 1.5) to 5000"
                        " (SDXL) is published. Raise it if images fall apart, lower it if too little changes."
                    ),
                ),
                advanced(
                    io.Boolean,
                    "sigma_bounds",
                    display_name="bounds are sigmas",
                    default=False,
                    optional=True,
                    tooltip=(
                        "For flow models. On: minimum and maximum timestep are noise levels (sigma) of the sampler,"
                        " whatever the model's own shift. Off: fractions of the schedule, before that shift."
                    ),
                ),
            ],
            outputs=[Objective.Output(display_name="GRAFT_OBJECTIVE")],
        )

    @classmethod
    def validate_inputs(
        cls,
        loss=None,
        weighting=None,
        prior=None,
        min_timestep=None,
        max_timestep=None,
        expert=None,
        boundary=None,
    ) -> bool | str:
        return refusal(
            cls,
            objectives.ObjectiveSettings,
            ("loss", "weighting"),
            ("loss", "prior"),
            ("min_timestep", "max_timestep"),
            ("expert", "boundary"),
            ("expert", "min_timestep", "max_timestep"),
            loss=loss,
            weighting=weighting,
            prior=prior,
            min_timestep=min_timestep,
            max_timestep=max_timestep,
            expert=expert,
            boundary=boundary,
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
                "Keeps a running average (EMA) of the trained weights. It is usually better than the"
                " last step, and always steadier."
            ),
            **aliases("ema", "exponential moving average", "weight averaging", "polyak"),
            inputs=[
                io.Combo.Input(
                    "schedule",
                    display_name="decay schedule",
                    options=list(averages.SCHEDULES),
                    default="constant",
                    tooltip=(
                        "How the decay changes over the run. constant: the decay below. ramp: min(decay,"
                        " (1+n)/(10+n)), good for short runs. warmup: 1-(1+n/g)^-p, where g is the warmup inverse"
                        " gamma and p the warmup power. power: Karras 2024, with the first width. target: chosen so"
                        " that the start share below is left after the run's total steps."
                    ),
                ),
                io.Float.Input(
                    "decay",
                    display_name="decay",
                    default=0.999,
                    min=0.0,
                    max=0.999999,
                    step=0.0001,
                    tooltip=(
                        "How much of the average stays at each step. 0.999 averages about 1000 steps; lower it"
                        " to 0.99 for short runs."
                    ),
                ),
                advanced(
                    io.Float,
                    "inv_gamma",
                    display_name="warmup inverse gamma",
                    default=1.0,
                    min=0.001,
                    max=10000.0,
                    step=0.1,
                    tooltip="For decay schedule warmup. Raise it to let the decay grow more slowly.",
                ),
                advanced(
                    io.Float,
                    "power",
                    display_name="warmup power",
                    default=0.6667,
                    min=0.001,
                    max=10.0,
                    step=0.0001,
                    tooltip="For decay schedule warmup. Raise it to let the decay grow faster.",
                ),
                advanced(
                    io.Float,
                    "target",
                    display_name="start share at the end",
                    default=0.1,
                    min=0.0001,
                    max=0.9999,
                    step=0.01,
                    tooltip=(
                        "For decay schedule target: the fraction of the starting weights that is left in the"
                        " average at the end of the run."
                    ),
                ),
                advanced(
                    io.Int,
                    "interval",
                    display_name="update every N steps",
                    default=1,
                    min=1,
                    max=100000,
                    tooltip=(
                        "Updates the average every N steps. Raise it to save time. The decay stays that of one step:"
                        " with 50, decay 0.99 a step becomes 0.605 an update (0.99^50). EveryDream2's decay is that of"
                        " an update: for its 0.99 every 50 steps set decay to 0.9998."
                    ),
                ),
                advanced(
                    io.Combo,
                    "device",
                    display_name="store average on",
                    options=["same", "host"],
                    default="same",
                    tooltip=(
                        "Where the average is kept. same: beside the weights. host: in CPU memory, to save GPU memory."
                    ),
                ),
                advanced(
                    io.Int,
                    "snapshots",
                    display_name="snapshot every N steps",
                    default=0,
                    min=0,
                    max=1_000_000,
                    tooltip=(
                        "Saves an average of each width to disk every N steps. EMA Merge makes an average of any"
                        " width from them. 0 is never."
                    ),
                ),
                advanced(
                    io.String,
                    "widths",
                    display_name="snapshot widths",
                    default="0.05 0.10",
                    tooltip=(
                        "The widths of the averages in the snapshots: how far back each reaches, as fractions of"
                        " the run. Decay schedule power uses the first. Keep the default unless you know better."
                    ),
                ),
                advanced(
                    io.Int,
                    "switch_every",
                    display_name="reset to average every N steps",
                    default=0,
                    min=0,
                    max=1_000_000,
                    tooltip=(
                        "Sets the weights to their average every N steps and continues training from there. 0 is never."
                    ),
                ),
            ],
            outputs=[EMA.Output(display_name="GRAFT_EMA")],
        )

    @classmethod
    def validate_inputs(cls, interval=None, snapshots=None, widths=None, switch_every=None) -> bool | str:
        return refusal(
            cls,
            _ema_settings,
            ("widths",),
            ("interval", "snapshots", "switch_every"),
            interval=interval,
            snapshots=snapshots,
            widths=widths,
            switch_every=switch_every,
        )

    @classmethod
    def execute(cls, **settings) -> io.NodeOutput:
        return io.NodeOutput(_ema_settings(**settings))


def _ema_settings(widths="0.05 0.10", **settings) -> averages.EMASettings:
    return averages.EMASettings(widths=averages.parse_widths(widths), **settings)


NODES = [GraftAdapter, GraftWords, GraftOptimizer, GraftObjective, GraftEMA]
