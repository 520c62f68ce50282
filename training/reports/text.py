"""Text reports of the training nodes: a run before its first step, and what a call of TrainStep did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from torch import Tensor

from ...ema.decay import EMASettings, decay_at, decay_over
from ...ema.decay import remarks as ema_remarks
from ...patches.lora_files.metadata import ON_TOP_OF
from ..data.dataset import Dataset
from ..data.epoch_order import batch_sizes, batches_per_epoch, small_batches
from ..objective import experts
from ..objective.settings import remarks as objective_remarks
from ..objective.timesteps import NO_EXPERT, describe_levels, tokens_of
from ..optimizers.checks import remarks
from ..optimizers.learning_rate_schedule import peak_rate
from ..optimizers.settings import OptimizerSettings
from ..run import epoch_settings
from ..run.call import Outcome
from ..state import TrainState
from ..store.store import DiskUse
from ..tasks.denoising import TRAINING_ONLY
from ..tasks.registry import task_of
from ..trainable.words import drop_words, group_by_word

_NAMED_BATCHES = 5  # of those that are not full


def beginning(
    state: TrainState,
    dataset: Dataset,
    unhashed: Sequence[str],
    sigma: Callable[[Tensor], Tensor] | None = None,
    training_only: str = "",
    takes_picture: bool = False,
    ranks: int = 1,
) -> str:
    """The report of GraftTrainStart: a run before its first step. `sigma` gives the noise levels of a flow model at
    timesteps, with its shift; `training_only` is the report on the training-only LoRA; `takes_picture` whether the
    model takes a picture beside the noise; `ranks` is how many share the batches of a step.
    """
    settings = state.settings.optimizer
    rounds = batches_per_epoch(dataset, settings.batch_size) / settings.accumulation
    length = "the steps asked for"
    if settings.total_steps:
        length = f"{settings.total_steps} steps"
    lines = [
        f"run {state.run!r}, identity {state.start.digest[:16]}",
        *_what_is_trained(state),
        (
            f"{settings.optimizer} at {peak_rate(settings):g}, {settings.schedule} over {length}, "
            f"batch {_batch_sizes(dataset, settings.batch_size)} x {settings.accumulation}"
        ),
        *remarks(settings),
        *_accumulation(settings.accumulation // ranks),
        *objective_remarks(state.settings.objective),
        *_open_schedule(settings),
        *_own_batch_sizes(dataset, settings),
        *task_of(state).beginning(state, dataset),
        _images(dataset, rounds),
        *_small_batches(dataset, settings.batch_size),
    ]
    if takes_picture:
        lines += _without_picture(dataset)
    if sigma is not None:
        tokens = tokens_of(dataset.images[0].shape)
        lines.append(describe_levels(state.settings.objective, sigma, tokens))
    if state.notes.get(ON_TOP_OF):
        lines.append(f"trained on top of {state.notes[ON_TOP_OF]}: what is saved belongs on a model that has it too")
    if training_only:
        lines += [TRAINING_ONLY, *(f"  {line}" for line in training_only.splitlines())]
    if not dataset.held_out:
        lines.append("no image is held out, so there is no validation (Dataset's validation split sets how many)")
    if state.start.ema is not None:
        ema = state.start.ema
        updates = _updates(ema, settings.total_steps)
        lines.append(f"EMA: {ema.schedule}, {updates}{_snapshots_and_switching(ema)}")
        lines += ema_remarks(ema, settings.total_steps)
    if unhashed:
        lines.append("results are neither stored nor reused, because these cannot be hashed: " + ", ".join(unhashed))
    return "\n".join(lines)


def _accumulation(batches: int) -> list[str]:
    """What to expect of gradient accumulation."""
    if batches < 2:
        return []
    return [
        f"gradient accumulation: a step takes {batches} batches, and every image in them counts the same. It saves"
        " memory, not time. With 6 to 8 images and more in a batch others saw worse images with it: set it to 1 if you"
        " do"
    ]


def _what_is_trained(state: TrainState) -> list[str]:
    adapter, layers = state.start.adapter, drop_words(state.trained)
    lines = []
    if layers:
        modules = {_module_of(name, adapter.full_weights) for name in layers}
        size = ""
        if not adapter.full_weights:
            size = f", rank {adapter.rank}, alpha {adapter.alpha or adapter.rank:g}"
        lines.append(
            f"trains {_numbers_in(layers):,} parameters in {len(modules)} modules: {adapter.kind} on"
            f" {adapter.targets}{size}"
        )
    words = state.start.words
    if words is None:
        return lines
    rate = ""
    if words.learning_rate:
        rate = f" at {words.learning_rate:g}"
    end = ""
    if words.stop_after < 1:
        end = f", until {words.stop_after:.0%} of the steps"
    for (word, parts), initial in zip(group_by_word(state.trained).items(), words.initial, strict=True):
        vectors = ", ".join(f"{part}: {len(tensor)}" for part, tensor in parts.items())
        lines.append(f"trains the word {word} ({vectors} vectors){rate}{end}, from {initial!r}")
    return lines


def _images(dataset: Dataset, rounds: float) -> str:
    count = f"{len(dataset.images)} images"
    if not dataset.has_pictures:
        count = f"{len(dataset.images)} sets of prompts on noise"
    return f"{count}, {len(dataset.held_out)} held out for validation; an epoch is {rounds:g} steps"


def _small_batches(dataset: Dataset, batch_size: int) -> list[str]:
    """Which batches of an epoch are not full, and what that means."""
    small = small_batches(dataset, batch_size)
    if not small or not dataset.has_pictures:
        return []
    named = []
    for one in small[:_NAMED_BATCHES]:
        group = f", batch_id {one.image.batch_id}" if one.image.batch_id else ""
        named.append(f"{one.size} of {one.batch_size} ({one.image.sides}{group})")
    more = ""
    if len(small) > len(named):
        more = f" and {len(small) - len(named)} more"
    batches = batches_per_epoch(dataset, batch_size)
    return [
        f"{len(small)} of {batches} batches of an epoch are not full: {', '.join(named)}{more}. None is filled with"
        " duplicates; a step takes the mean over its images, so those in a small batch count more. Add images of that"
        " size and batch_id, or choose a batch size that divides their number"
    ]


def _without_picture(dataset: Dataset) -> list[str]:
    """How many images bring no picture for a model that takes one beside the noise."""
    without = 0
    for image in dataset.images:
        names = set(image.extras)  # no look-up, which would read them
        without += image.brought is None and "concat_latent_image" not in names
    if not without:
        return []
    return [
        f"{without} of {len(dataset.images)} images have no control picture: this model takes one beside the noise, and"
        " trains on an empty one with them"
    ]


def _open_schedule(settings: OptimizerSettings) -> list[str]:
    """What total steps of 0 means for a schedule that falls."""
    if settings.total_steps or settings.schedule == "constant":
        return []
    return [
        f"total steps (schedule) is 0, so the schedule ({settings.schedule}) falls to its end in each Train Step. In a"
        " chain of them the learning rate rises again in the next, and more steps train all steps again: set total"
        " steps (schedule) to the steps of the whole chain for one schedule"
    ]


def _batch_sizes(dataset: Dataset, batch_size: int) -> str:
    return " and ".join(map(str, batch_sizes(dataset, batch_size)))


def _own_batch_sizes(dataset: Dataset, settings: OptimizerSettings) -> list[str]:
    """Where datasets have batch sizes of their own: what Optimizer Settings' batch size is left for."""
    if not any(image.batch_size for image in dataset.images):
        return []
    own = " and ".join(sorted({str(image.batch_size) for image in dataset.images if image.batch_size}, key=int))
    line = f"own batch size of Dataset: {own}, in place of Optimizer Settings' {settings.batch_size}"
    if settings.scale_lr:
        line += ", by which scale learning rate still goes"
    return [line]


def _module_of(name: str, full_weights: bool) -> str:
    """The module of a trained tensor, `<module>.weight` or, of an adapter, such as `<module>.lora_down.weight`."""
    if not full_weights:
        name = name.removesuffix(".weight")
    return name.rpartition(".")[0]


def _numbers_in(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def _updates(ema: EMASettings, total_steps: int) -> str:
    """How often the average moves, and what that makes of its decay."""
    if ema.interval == 1:
        decay = ""
        if ema.schedule == "target" and total_steps:
            decay = f" with decay {decay_at(ema, 1, total_steps):.6g}"
        return f"updated every step{decay}"
    last = total_steps - total_steps % ema.interval
    if not last:  # total steps are open, or there is no update
        return f"updated every {ema.interval} steps"
    one, update = decay_at(ema, last, total_steps), decay_over(ema, last, total_steps)
    when = ""
    if ema.schedule not in ("constant", "target"):
        when = f" at step {last}"
    return f"updated every {ema.interval} steps: decay {one:.6g} a step becomes {update:.3g} an update{when}"


def _snapshots_and_switching(ema: EMASettings) -> str:
    text = ""
    if ema.snapshots:
        widths = " and ".join(f"{width:g}" for width in ema.widths)
        text += f"; snapshots every {ema.snapshots} steps with widths {widths}"
    if ema.switch_every:
        text += f"; the weights are reset to the average every {ema.switch_every} steps"
    return text


def disk_use(used: DiskUse) -> str:
    """The report's sentence on the disk space of a run and of all runs, and on their limit."""
    states = "1 state" if used.states == 1 else f"{used.states} states"
    text = (
        f"the run's folder holds {states}, {used.run / 1e6:.1f} MB; delete it to free the space. All runs take"
        f" {used.every / 1e9:.2f} GB"
    )
    if not used.limit:
        return f"{text}, without a limit (GRAFT_STORE_GB is 0)"
    if used.every > used.limit:
        explanation = ", over the limit because this run or unfinished ones need the space"
    else:
        explanation = ""
    return f"{text} of at most {used.limit / 1e9:g} GB (GRAFT_STORE_GB){explanation}"


def _held_out_loss(outcome: Outcome) -> list[str]:
    """The held-out loss at the first, the last and the best step, and where the state of the best is kept."""
    history = outcome.state.history
    lines = [f"held-out loss {_first_and_last(history.comparable)}"]
    if history.comparable_average:
        lines.append(f"held-out loss of the running average {_first_and_last(history.comparable_average)}")
    if history.best is None:
        lines[-1] += ", none of them finite"
        return lines
    best_step, best = history.best
    lines[-1] += f", best {best:.4g} at {best_step}"
    if outcome.best is not None and outcome.best != outcome.folder:
        lines.append(
            f"the state of the best step is kept in {outcome.best}; to get it, train {best_step} steps from the same"
            " start"
        )
    return lines


def _first_and_last(validations: Sequence[tuple[int, float]]) -> str:
    (first_step, first), (last_step, last) = validations[0], validations[-1]
    if first_step == last_step:
        return f"{first:.4g} at step {first_step}"
    return f"{first:.4g} at step {first_step}, {last:.4g} at {last_step}"


def _previews(state: TrainState, pictures: Sequence[Mapping[str, str]]) -> list[str]:
    """How many previews there are, and which files."""
    if not pictures:
        return []
    names = f"from {pictures[0]['filename']} to {pictures[-1]['filename']}"
    lines = [f"{len(pictures)} previews, {names} in the run's folder"]
    if state.settings.objective.expert != NO_EXPERT:
        lines.append(experts.ALONE)
    return lines


def step(
    before: TrainState, outcome: Outcome, unhashed: Sequence[str], pictures: Sequence[Mapping[str, str]] = ()
) -> str:
    """The report of a call of TrainStep: what it did, the losses, and where the result is stored."""
    state = outcome.state
    losses = state.history.loss[before.step :]
    lines = [f"run {state.run!r}: step {before.step} to {state.step}, {outcome.trained} trained now"]
    lines += epoch_settings.report(state, len(before.taken))
    lines += [*outcome.notes, *remarks(state.settings.optimizer), *objective_remarks(state.settings.objective)]
    if outcome.trained and outcome.seconds:
        lines.append(f"{outcome.seconds / outcome.trained:.3f} s per step, {outcome.seconds:.1f} s in total")
    if losses:
        window = max(1, min(10, len(losses) // 2))
        lines.append(
            f"loss {losses[0]:.4g} at the first step, {losses[-1]:.4g} at the last; mean of the first {window}"
            f" {fmean(losses[:window]):.4g}, of the last {window} {fmean(losses[-window:]):.4g}"
        )
    if state.history.comparable:
        lines += _held_out_loss(outcome)
    where, *others = task_of(state).report(state)
    lines += [f"{_numbers_in(state.trained):,} trained parameters; {where}", *others]
    lines += _previews(state, pictures)
    if outcome.folder is not None:
        lines.append(f"stored in {outcome.folder}")
        if outcome.used is not None:
            lines.append(disk_use(outcome.used))
    elif unhashed:
        lines.append("not stored, because these cannot be hashed: " + ", ".join(unhashed))
        if state.start.ema is not None and state.start.ema.snapshots:
            lines.append("so no snapshots of averages were kept either")
    return "\n".join(lines)
