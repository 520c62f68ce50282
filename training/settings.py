"""All settings of a training, as one value that goes along one link: what is trained, how it moves, what it learns, and
the averages of it. And those of Train Step: for how long, and what is measured, shown and kept on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..ema.decay import EMASettings
from ..settings.declaration import check_values, setting
from .objective.settings import ObjectiveSettings
from .optimizers.settings import OptimizerSettings
from .store.names import KEEPS, SHOWN
from .trainable.settings import AdapterSettings
from .trainable.words import WordSettings

# What each part is set by, as the editor calls it.
NODES = {
    "adapter": "Adapter Settings",
    "optimizer": "Optimizer Settings",
    "objective": "Objective Settings",
    "ema": "EMA Settings",
    "words": "Train Words",
    "training_only": "Training-only LoRA",
}


GO_ON = "save more and go on"


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a training. A part that is None was not chosen: a run takes its defaults, and has no average, no
    words and no training-only LoRA.

    `training_only` are the rows of the LoRA stack that is on only while the loss is computed.
    """

    adapter: AdapterSettings | None = None
    optimizer: OptimizerSettings | None = None
    objective: ObjectiveSettings | None = None
    ema: EMASettings | None = None
    words: WordSettings | None = None
    training_only: Sequence[Any] | None = None

    def chosen(self) -> tuple[str, ...]:
        """The names of the parts that were chosen."""
        return tuple(one.name for one in fields(self) if getattr(self, one.name) is not None)

    def refuse_others(self, allowed: Sequence[str], node: str, why: str) -> None:
        """Raises ValueError where a part was chosen that a node cannot use."""
        others = [NODES[name] for name in self.chosen() if name not in allowed]
        if others:
            raise ValueError(f"{node}: settings has {' and '.join(others)}, {why}.")


@dataclass(frozen=True)
class StepSettings:
    """The settings of Train Step; plain values, checked on creation. `prompts` is text (`run.preview_prompts`)."""

    steps: int = setting(
        "steps",
        100,
        "How many more steps to train. Raise it and queue again to continue from the last result.",
        low=0,
        high=10_000_000,
        kohya=("--max_train_steps", "set total steps (schedule) in Optimizer Settings to the same"),
        ai_toolkit="train.steps",
    )
    epochs: float = setting(
        "epochs (replaces steps)",
        0.0,
        "Trains this many epochs instead of steps: passes through all images. 0 uses steps.",
        low=0.0,
        high=100_000.0,
        step=0.5,
        kohya="--max_train_epochs",
        onetrainer="Epochs",
        everydream2="--max_epochs",
    )
    validate_every: int = setting(
        "validate every N steps",
        50,
        "Measures the loss on the held-out images every N steps. With EMA Settings it measures the average as well,"
        " which doubles the time. Raise it if validation takes too long; 0 is never.",
        low=0,
        high=1_000_000,
        kohya="--validate_every_n_steps",
        onetrainer="Validate after",
        diffusers=("implicit_acc", "the report names the implicit accuracy on held-out pairs"),
    )
    preview_every: int = setting(
        "preview every N steps",
        0,
        "Samples a preview every N steps, with the weights and with their average. Connect positive, negative and"
        " latent, or Preview End to sample with your own nodes. 0 is never.",
        low=0,
        high=1_000_000,
        kohya=(
            "--sample_every_n_steps",
            "of positive prompt, negative prompt and latent, which gives the size. 20 steps of Euler if `--s` and"
            " `--ss` give none",
        ),
        ai_toolkit="sample.sample_every",
        onetrainer="Sample After",
        lunnova=("batch_frequency", "of ImageLogger"),
        everydream2="sample_steps",
    )
    snapshot_every: int = setting(
        "snapshot every N steps",
        100,
        "Stores the state every N steps. A run that is killed continues from the last one. Lower it if steps are"
        " slow; 0 is never.",
        low=0,
        high=1_000_000,
        advanced=True,
        kohya=(
            "--save_every_n_steps, --save_state, --resume",
            "they are states; Save LoRA makes a file of one, and a run goes on when it is queued again",
        ),
        lunnova=("periodic_checkpoint_overwrite", "`every_n_train_steps`, such as 2000. Each replaces the last one"),
        ai_toolkit="save.save_every",
        onetrainer=("Save Every", "Continue from last backup: queue again"),
    )
    keep: str = setting(
        "states to keep",
        "best",
        "Which states stay on disk. last: the final one. best: also the one with the lowest held-out loss; if there"
        " is an average, its loss counts. every: these and all snapshots, if you want to branch from them.",
        choices=KEEPS,
        advanced=True,
        ai_toolkit=("save.max_step_saves_to_keep", "`every` keeps all"),
        lunnova=("monitored_checkpoint, save_top_k: 1", "`best`, by the held-out loss"),
    )
    snapshot_minutes: float = setting(
        "snapshot every N minutes",
        10.0,
        "Also stores a snapshot when this many minutes have passed since the last one. 0 is never.",
        low=0.0,
        high=10_000.0,
        step=1.0,
        advanced=True,
        onetrainer="Backup After",
        everydream2="ckpt_every_n_minutes",
    )
    when_short: str = setting(
        "when memory runs out",
        GO_ON,
        "What to do when memory runs out. save more and go on: takes the next saving that leaves the result as it is,"
        " in the order of the plan (gradient checkpointing, then offload to CPU memory), and trains on from the last"
        " whole step. stop: ends with an error.",
        choices=(GO_ON, "stop"),
        advanced=True,
    )
    tensorboard: bool = setting(
        "write TensorBoard logs",
        False,
        "Writes TensorBoard files into the run's folder. Needs the Python package tensorboard. For another folder, name"
        " it graft_runs in extra_model_paths.yaml.",
        advanced=True,
        kohya="--logging_dir, --log_with tensorboard",
        ai_toolkit=("logging.use_wandb", "there is no wandb"),
        everydream2=("--logdir", "into `output/graft`, or the folder named `graft_runs` in extra_model_paths.yaml"),
        lunnova=("TensorBoardLogger", "with the previews in it"),
    )
    prompts: str = setting(
        "more preview prompts",
        "",
        "More prompts for the previews, one per line, at most 16. Lines that start with # are skipped. They are"
        " encoded with the CLIP of Start Training as trained so far, and sampled with the run's seed. kohya's --n,"
        " --d, --s, --l, --g, --ss, --w and --h, and --sc for the scheduler, work at the end of a line.",
        multiline=True,
        advanced=True,
        kohya=(
            "--sample_prompts",
            "up to 16, one a line, with `--n`, `--d`, `--s`, `--l`, `--g`, `--ss`, `--w` and `--h`",
        ),
        ai_toolkit=("sample.prompts", "up to 16"),
        lunnova=("ddim_steps: 50", "`--s 50 --ss ddim` behind a prompt"),
    )
    switch_every: int = setting(
        "switch experts every N steps",
        50,
        "For both experts of Wan 2.2: trains one for N steps, then the other, with one model in VRAM at a time. It"
        " does not change the result. Raise it if loading takes long; 0 trains the high noise expert first and then"
        " the low noise one.",
        low=0,
        high=1_000_000,
        advanced=True,
        ai_toolkit="switch_boundary_every",
    )
    keep_every: int = setting(
        "keep a state every N steps",
        0,
        "Keeps the state of every N-th step for good, in addition to the snapshots, each of which replaces the one"
        " before it: for example, snapshot every 2,000 steps and keep every 20,000. 0 is never.",
        low=0,
        high=10_000_000,
        advanced=True,
        lunnova=("periodic_checkpoint, save_top_k: -1", "`every_n_train_steps`, such as 20000"),
    )
    preview_of: str = setting(
        "previews show",
        "both",
        "Which weights previews are sampled with: the trained weights, their average, or both one after the other."
        " Only one of them takes half the time.",
        choices=SHOWN,
        advanced=True,
        everydream2=(
            "--ema_sample_ema_model, --ema_sample_nonema_model",
            "both are on by default; EveryDream2 shows only what has its flag",
        ),
        lunnova=("use_ema_scope: False", "`weights`"),
    )
    log_seconds: int = setting(
        "write logs every N seconds",
        120,
        "How often the TensorBoard files are written to disk. Lower it to see a slow run sooner.",
        low=1,
        high=86_400,
        advanced=True,
        lunnova="flush_secs",
    )
    log_every: int = setting(
        "log every N steps",
        1,
        "How often TensorBoard logs get a point: the mean loss since the last one, and the other numbers as they are"
        " then. Raise it for smaller logs and a smoother curve.",
        low=1,
        high=1_000_000,
        advanced=True,
        everydream2=("--log_step", "25 in EveryDream2, 1 here"),
    )
    keep_epochs: int = setting(
        "keep a state every N epochs",
        0,
        "Keeps the state at the end of every N-th epoch for good. 0 is never.",
        low=0,
        high=100_000,
        advanced=True,
        kohya="--save_every_n_epochs",
        everydream2=("--save_every_n_epochs", "states are kept; Save LoRA makes a file of one"),
    )
    keep_from: int = setting(
        "keep from epoch",
        0,
        "For keep a state every N epochs: the first epoch whose state is kept. Raise it to leave out early ones.",
        low=0,
        high=100_000,
        advanced=True,
        everydream2="--save_ckpts_from_n_epochs",
    )
    load_settings: bool = setting(
        "load settings every epoch",
        False,
        "Reads train.json in the run's folder at the beginning of each epoch, and goes on with what it says: learning"
        " rate, gradient norm, conditioning dropout, noise, min-SNR, CLIP skip and which states are kept, by"
        " EveryDream2's keys. Switch it on to change them while a run goes on.",
        advanced=True,
        everydream2=("--load_settings_every_epoch", "`train.json` lies in `output/graft/<run>`"),
    )

    def __post_init__(self) -> None:
        check_values(self, "Train Step")
