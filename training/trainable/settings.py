"""Settings of what is trained, and their validation: adapter kind, rank, targets, dropouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from torch import Tensor

from ...patches.adapters import registry
from ...patches.adapters.rank_mask import RankMask
from ...patches.adapters.trainable import TrainableAdapter, TrainableKind
from ...settings.declaration import check_values, setting
from ...storage.digest import settings_to_hash, sha256_of_tensors
from .patterns import Patterns, matches, parse_patterns

TARGETS = ("attention", "attention+ff", "all")
AS_LOADED = "as loaded"
BASE_WEIGHTS = (AS_LOADED, "int8", "int8 weight-only", "nf4")  # the formats of `memory.quantized_base.registry`
TEXT_ENCODER = "text_encoders."  # what trained names of a text encoder begin with, as ComfyUI's generic names do
WORDS = "bundle_emb."  # and those of trained words, as OneTrainer's files have them


def is_word(name: str) -> bool:
    """Whether a trained tensor is the vectors of a trained word (`words`)."""
    return name.startswith(WORDS)


@dataclass(frozen=True)
class AdapterSettings:
    """The settings of GraftAdapter: what is trained; plain values, checked on creation.

    Only `initial` holds tensors, and its digest stands for it.

    `attention` is every projection of self- and cross-attention; `attention+ff` adds feed-forward and the transformers'
    proj_in and proj_out; `all` is every module of the model. kind lora takes linear layers and convolutions of kernel
    1, full every parameter, the others every convolution too. `pattern` narrows the choice and gives single parts a
    rank and alpha of their own (`patterns.parse_patterns`). `rank` is the size of the factors; of oft the side of the
    blocks (or their number, whichever is larger). `alpha` 0 is the rank. `min_rank` and `rank_exponent` are T-LoRA's:
    how many ranks work on noise alone (0 is half of them), and how their number grows as noise goes. `base_weights`
    other than as loaded: the frozen linear layers of the model are quantized while training
    (`training.memory.quantized_base`). `factor` is LoKr's (0: as square as possible).
    `with_sound` is not a setting of the node: it is whether the dataset has videos with their sound, so that the layers
    for that are trained too.
    """

    kind: str = setting(
        "adapter type",
        "lora",
        lambda: "".join(f"{kind.name}: {kind.help}. " for kind in registry.trainable_kinds()) + "Start with lora.",
        choices=registry.trainable_names,
        kohya=("--network_module", "`networks.lora` is `lora`; of `lycoris.kohya`, `algo` is the type"),
        ai_toolkit="network.type",
        onetrainer=(
            "Type",
            "Decompose Weights (DoRA) is `dora`, with one scale per input column; OFT is `oft`. Apply on output"
            " axis, Block Share and Scaled OFT are read from files, and not trained",
        ),
    )
    rank: int = setting(
        "rank (dim)",
        16,
        "The rank of the matrices, network_dim in kohya's scripts (for oft, the block size). Raise it to learn more"
        " and get a larger file; lower it if the LoRA overfits.",
        low=1,
        high=4096,
        kohya="--network_dim",
        ai_toolkit="network.linear",
        onetrainer=("LoRA rank", "of OFT its Block Size"),
        diffusers="--rank",
    )
    alpha: float = setting(
        "alpha",
        0.0,
        "The LoRA is scaled by alpha / rank. 0 means alpha = rank, a scale of 1. Set it to half the rank for a"
        " gentler start.",
        low=0.0,
        high=4096.0,
        step=0.5,
        kohya="--network_alpha",
        ai_toolkit="network.linear_alpha",
        onetrainer="LoRA alpha",
    )
    targets: str = setting(
        "target layers",
        "attention",
        "Which layers to train. attention: the attention projections. attention+ff: also feed-forward layers and the"
        " transformers' in and out projections. all: every layer. Go from attention to all if the LoRA learns too"
        " little.",
        choices=TARGETS,
        onetrainer=("Layer Filter", "or a pattern of your own in layer filter"),
    )
    pattern: str = setting(
        "layer filter",
        "",
        "Limits training to layers whose path matches: globs (output_blocks.*) or /regular expressions/, separated by"
        " commas; ! excludes. input_blocks.*=rank 8, alpha 4 gives those layers their own rank and alpha. Leave it"
        " empty to train all target layers.",
        advanced=True,
        ai_toolkit=("network.network_kwargs.only_if_contains, ignore_if_contains", "`*name*`, `!*name*`"),
    )
    text_encoder: bool = setting(
        "train text encoder",
        False,
        "Also trains the text encoder, in the layers that target layers and layer filter choose. Connect CLIP to"
        " Start Training.",
        kohya=("--network_train_unet_only", "off, the default"),
        ai_toolkit="train.train_text_encoder",
        onetrainer="Train Text Encoder",
    )
    rank_dropout: float = setting(
        "rank dropout",
        0.0,
        "Randomly drops this fraction of the rank dimensions for each image. Try 0.1 if the LoRA overfits.",
        low=0.0,
        high=0.99,
        step=0.01,
        advanced=True,
        kohya=("rank_dropout", "in `--network_args`"),
    )
    module_dropout: float = setting(
        "module dropout",
        0.0,
        "Randomly skips this fraction of the trained layers at each step. Try 0.1 if the LoRA overfits.",
        low=0.0,
        high=0.99,
        step=0.01,
        advanced=True,
        kohya=("module_dropout", "in `--network_args`"),
    )
    network_dropout: float = setting(
        "network dropout",
        0.0,
        "Randomly zeroes this fraction of the activations inside the LoRA. Try 0.1 if the LoRA overfits.",
        low=0.0,
        high=0.99,
        step=0.01,
        advanced=True,
        kohya="--network_dropout",
        ai_toolkit="network.dropout",
        onetrainer="Dropout Probability",
    )
    max_norm: float = setting(
        "maximum weight norm",
        0.0,
        "Scales a layer's change down when its norm grows above this (kohya's scale_weight_norms). Try 1 if some"
        " layers overbake; 0 is off.",
        low=0.0,
        high=1000.0,
        step=0.1,
        advanced=True,
        kohya="--scale_weight_norms",
    )
    min_rank: int = setting(
        "smallest rank",
        0,
        "T-LoRA (tlora) only: how many ranks are used at pure noise; toward a finished image, all are. 0 is half the"
        " rank. Set it lower, down to 1, if the LoRA copies the training images' composition.",
        low=0,
        high=4096,
        advanced=True,
    )
    rank_exponent: float = setting(
        "rank exponent",
        1.0,
        "T-LoRA (tlora) only: how the number of ranks grows as the noise falls (the authors' alpha_rank_scale). With"
        " 1 it grows evenly; above 1, later.",
        low=0.01,
        high=100.0,
        step=0.1,
        advanced=True,
    )
    base_weights: str = setting(
        "base weights",
        AS_LOADED,
        "How the model's linear layers are stored during training; the adapter stays in full precision. int8: they"
        " multiply in int8 (W8A8). int8 weight-only, nf4 (QLoRA): they are unpacked to multiply. On a graphics card,"
        " int8 takes half of bf16's memory and nf4 28%. Previews and validation use the weights as loaded. Not with"
        " adapter type full.",
        choices=BASE_WEIGHTS,
        advanced=True,
        ai_toolkit=(
            "model.quantize, model.qtype",
            "`int8 weight-only` for `qint8`, `nf4` for `uint4`; for `qfloat8` weight_dtype of Load Diffusion Model",
        ),
        onetrainer=(
            "data type of the transformer or UNet",
            "NFLOAT_4 is `nf4`, INT_W8A8 `int8`; for INT_8 the nearest is `int8 weight-only`; for FLOAT_8"
            " weight_dtype of Load Diffusion Model",
        ),
    )
    factor: int = setting(
        "LoKr factor",
        0,
        "LoKr (lokr) only: a side of the small first matrix, where it divides the layer's (LyCORIS' factor). 4 to 16"
        " are usual. Lower it to learn more and get a larger file; 0 makes both matrices about as large.",
        low=0,
        high=4096,
        advanced=True,
        kohya=("factor", "in `--network_args` of `lycoris.kohya`; -1 is 0 here. `full_matrix=True` is rank (dim) 4096"),
        ai_toolkit=("network.lokr_factor", "-1 is 0 here; `lokr_full_rank` is rank (dim) 4096"),
    )
    initial_digest: str = ""
    initial: Mapping[str, Tensor] | None = field(default=None, repr=False, compare=False)
    with_sound: bool = False

    def __post_init__(self) -> None:
        check_values(self, "Adapter Settings", _kind_errors)
        if self.initial is not None and not self.initial_digest:
            object.__setattr__(self, "initial_digest", sha256_of_tensors(self.initial))

    def identity(self) -> dict[str, Any]:
        """The settings that a run is known by, as plain values."""
        return settings_to_hash(self, ("initial",))

    @property
    def trainable_kind(self) -> TrainableKind:
        """The registry's record of `kind`."""
        return registry.trainable_kind(self.kind)

    @property
    def full_weights(self) -> bool:
        """Whether the weights themselves are trained, and no adapter."""
        return self.trainable_kind.full_weights

    @property
    def adapter(self) -> TrainableAdapter:
        """How the adapter trains; only where `full_weights` is false."""
        assert not self.full_weights
        return cast(TrainableAdapter, self.trainable_kind)

    @cached_property
    def patterns(self) -> Patterns:
        """The parsed `pattern`."""
        return parse_patterns(self.pattern)

    @property
    def quantized_base(self) -> bool:
        """Whether the model's frozen linear layers are quantized while training."""
        return self.base_weights != AS_LOADED

    @property
    def any_dropout(self) -> bool:
        """Whether any dropout is on."""
        return bool(self.rank_dropout or self.module_dropout or self.network_dropout)

    def size_of(self, path: str) -> tuple[int, float]:
        """The size of the adapter at a module's path, from the last pattern that gives it, else from the settings.

        Args:
            path: the module's path.

        Returns:
            (rank, alpha); a setting of alpha 0 means the rank.
        """
        rank, alpha = self.rank, self.alpha
        for size in self.patterns.sizes:
            if matches(path, size.pattern):
                rank = rank if size.rank is None else size.rank
                alpha = alpha if size.alpha is None else size.alpha
        return rank, alpha or float(rank)

    def rank_mask_of(self, path: str) -> RankMask | None:
        """Which ranks work at which noise level, of the adapter at a module's path; None where all always do: a text
        encoder sees no noise.
        """
        if not self.trainable_kind.masks_ranks or path.startswith(TEXT_ENCODER):
            return None
        rank, _ = self.size_of(path)
        return RankMask(rank, min(rank, self.min_rank or max(1, rank // 2)), self.rank_exponent)


def _dropouts(settings: AdapterSettings) -> list[tuple[str, float]]:
    """(The node's label, value) of every dropout."""
    return [
        ("rank dropout", settings.rank_dropout),
        ("module dropout", settings.module_dropout),
        ("network dropout", settings.network_dropout),
    ]


def _kind_errors(settings: AdapterSettings) -> Iterator[str]:
    """Errors for settings that this adapter kind does not have."""
    try:
        sizes = parse_patterns(settings.pattern).sizes
    except ValueError as error:
        yield str(error)
        return
    kind = settings.kind
    if settings.min_rank > settings.rank and settings.trainable_kind.masks_ranks:
        yield f"smallest rank is {settings.min_rank}, expected at most rank (dim), which is {settings.rank}"
    if settings.full_weights:
        for label, value in (
            *_dropouts(settings),
            ("maximum weight norm", settings.max_norm),
            ("alpha", settings.alpha),
        ):
            if value:
                yield f"{label} needs an adapter, and adapter type {kind} trains without one: set it to 0"
        if settings.quantized_base:
            yield (
                f"base weights {settings.base_weights} needs a frozen base, and adapter type {kind} trains it: set it"
                f" to {AS_LOADED}"
            )
        if sizes:
            yield f"layer filter sets a rank or an alpha, and adapter type {kind} has neither: take them out"
        if settings.initial is not None:
            yield (
                f"initial LoRA is a LoRA to continue from, and adapter type {kind} trains no LoRA: apply it to the"
                " model instead"
            )
        return
    if not settings.trainable_kind.takes_alpha and (settings.alpha or any(size.alpha is not None for size in sizes)):
        yield f"adapter type {kind} does not use alpha: set it to 0"
    if not settings.trainable_kind.network_dropout and settings.network_dropout:
        yield (
            f"network dropout drops the activations inside an adapter, and adapter type {kind} has none: use rank"
            " dropout or module dropout"
        )
