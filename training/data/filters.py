"""The YAML text of GraftDataset's `filters`: which images are taken, what happens to their tags, crops, masks, the
cache. One record per key.

The keys from `consider_every_nth` to `tag_bonus_scores`, `size` and `flip_p` are those of LunNova's loader
(translunar-diffusion), the others Graft's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from .lunnova_yaml import as_filters
from .yaml_values import (
    load_mapping,
    read_chance,
    read_choice,
    read_encoding,
    read_flag,
    read_number,
    read_number_from,
    read_replacements,
    read_scores,
    read_tags,
    read_text,
    read_whole_number,
    read_whole_numbers,
    shorten,
    unknown_key,
)


@dataclass(frozen=True)
class FilterKey:
    """One key of the YAML: its reader, its line of documentation, and when it does nothing.

    `read` raises ValueError that says what was expected. `needs` gets the whole mapping and says whether the key can
    have an effect; if not, `without` says what is missing: "without crop: random".
    """

    read: Callable[[Any], Any]
    documentation: str
    needs: Callable[[Mapping[str, Any]], bool]
    without: str


def _key(
    default: Any,
    read: Callable[[Any], Any],
    documentation: str,
    needs: Callable[[Mapping[str, Any]], bool] = lambda values: True,
    without: str = "",
) -> Any:
    """A field of `Filters` with its record."""
    return field(default=default, metadata={"key": FilterKey(read, documentation, needs, without)})


@dataclass(frozen=True)
class Filters:
    """The settings of the YAML, checked by `parse`."""

    consider_every_nth: int = _key(
        1, read_whole_number(1), "Takes only every nth image (or JSON file), in the order of their names."
    )
    shuffle_tag_p: float | None = _key(
        None, read_chance, "The chance that the tags are shuffled; without it the node's shuffle tags counts."
    )
    blacklist_tags: tuple[str, ...] = _key((), read_tags, "Leaves out images with one of these tags.")
    non_caption_tags: tuple[str, ...] = _key((), read_tags, "Removes these tags from the captions.")
    replacements: tuple[tuple[str, str], ...] = _key(
        (), read_replacements, "Replaces 'old': 'new' inside every tag, in this order."
    )
    tag_separator: str = _key(", ", read_text, "Stands between the tags of a caption.")
    abs_min_score: float | None = _key(None, read_number, "Leaves out images with a lower score.")
    min_score: float | None = _key(
        None, read_number, "Leaves out images with a lower score, counted with tag_bonus_scores."
    )
    score_tags: tuple[int, ...] = _key(
        (), read_whole_numbers(), "The highest of these that the score reaches becomes a tag, as scr800."
    )
    tag_bonus_scores: tuple[tuple[str, float], ...] = _key(
        (),
        read_scores,
        "Adds tag: number to the score of images with that tag.",
        needs=lambda values: not values["tag_bonus_scores"] or "min_score" in values,
        without="without min_score",
    )
    wildcards: bool = _key(
        False, read_flag, "Draws one of {a|b}, one line of many (kohya's enable_wildcard) and __name__ of word lists."
    )
    keep_separator: str = _key(
        "",
        read_text,
        "Tags before it neither move nor drop out, nor do those after a second one (kohya's keep_tokens_separator).",
    )
    trigger: str = _key(
        "",
        read_text,
        "Replaces [trigger] in a caption, or stands in front of one without the word (AI-Toolkit's trigger_word).",
    )
    caption_prefix: str = _key("", read_text, "Stands in front of every caption; its tags move with the others.")
    caption_suffix: str = _key("", read_text, "Stands behind every caption; its tags move with the others.")
    encoding: str = _key("utf-8", read_encoding, "The text encoding of caption files.")
    resolutions: tuple[int, ...] = _key(
        (),
        read_whole_numbers(64, 8192),
        "Shows each image at these resolutions beside the node's, as AI-Toolkit's list of resolutions.",
    )
    crop: str = _key(
        "center",
        read_choice("center", "top", "random"),
        "Where an image that is longer than its bucket is cropped.",
    )
    crops: int = _key(
        4,
        read_whole_number(2, 1_000),
        "How many crops of each image crop: random draws.",
        needs=lambda values: values.get("crop") == "random",
        without="without crop: random",
    )
    frame_sample: int = _key(
        4, read_whole_number(1, 1_000), "How many parts of a clip part of clips: uniform takes (musubi-tuner's)."
    )
    frame_stride: int = _key(
        10,
        read_whole_number(1, 36_000),
        "How many frames apart the parts of part of clips: slide begin (musubi-tuner's).",
    )
    size_conditioning: bool = _key(
        True, read_flag, "Gives models that take it (SDXL) the original size, crop and target size."
    )
    masks: str = _key("files", read_choice("files", "alpha", "both", "off"), "Where the loss masks come from.")
    small: str = _key("enlarge", read_choice("enlarge", "skip"), "What happens to an image smaller than its bucket.")
    changed: str = _key("continue", read_choice("continue", "stop"), "What happens when a file changes while training.")
    cache: bool = _key(True, read_flag, "Keeps latents and conditionings on disk.")
    cache_gb: float = _key(
        20.0,
        read_number_from(0.001),
        "How large that cache may grow, in GB.",
        needs=lambda values: values.get("cache", True),
        without="with cache: false",
    )
    write_schedule: bool = _key(False, read_flag, "Writes a text file of which image goes into which step.")
    workers: int = _key(
        0,
        read_whole_number(0, 64),
        "Threads that prepare batches ahead; 0 is one where not all fits into memory. The result never changes.",
    )
    leave_out: tuple[str, ...] = _key(
        (), read_tags, "Leaves out the images of these names, as the panel's Leave out writes them."
    )

    size: int | None = _key(
        None, read_whole_number(64, 8192), "The resolution, in place of the node's (LunNova's size)."
    )
    flip_p: float | None = _key(None, read_chance, "The flip probability, in place of the node's.")
    validation: Filters | None = _key(  # noqa: RUF009
        None,
        lambda value: _read_validation(value),
        "Filters of the images that only measure the loss; what it does not name is as above.",
    )

    @property
    def needs_scores(self) -> bool:
        """Whether images need a score."""
        thresholds = (self.abs_min_score, self.min_score)
        return bool(thresholds != (None, None) or self.score_tags or self.tag_bonus_scores)

    def reason_to_skip(self, tags: Sequence[str], score: float | None) -> str | None:
        """Why an image with these tags and this score is left out, or None."""
        if self.needs_scores and score is None:
            return "without a score"
        if self.abs_min_score is not None and score is not None and score < self.abs_min_score:
            return "below abs_min_score"
        bonus = sum(value for tag, value in self.tag_bonus_scores if tag in tags)
        if self.min_score is not None and score is not None and score + bonus < self.min_score:
            return "below min_score"
        if set(self.blacklist_tags) & set(tags):
            return "with a tag of blacklist_tags"
        return None

    def score_tag(self, score: float | None) -> tuple[str, ...]:
        """The tag that a score earns: of the highest of `score_tags` that it reaches."""
        if score is None:
            return ()
        reached = [threshold for threshold in self.score_tags if score >= threshold]
        if not reached:
            return ()
        return (f"scr{max(reached)}",)

    @classmethod
    def keys(cls) -> dict[str, FilterKey]:
        """The record of every key, by name."""
        return {key.name: _record(key) for key in fields(cls)}

    @classmethod
    def parse(cls, text: str) -> Filters:
        """Filters of a YAML mapping, also of one as LunNova's configuration has it; raises ValueError that lists every
        key that is unknown or has a wrong value.
        """
        return cls.of_mapping(as_filters(load_mapping(text, "the text")))

    @classmethod
    def of_mapping(cls, given: Mapping[Any, Any]) -> Filters:
        """Filters of a mapping. Raises ValueError as `parse` does."""
        keys = cls.keys()
        errors: list[str] = []
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name not in keys:
                errors.append(unknown_key(str(name)[:80], keys))
                continue
            if name == "validation" and isinstance(value, Mapping):
                value = {**{other: given[other] for other in given if other != name}, **value}
            try:
                values[name] = keys[name].read(value)
            except ValueError as error:
                errors.append(f"{name} is {shorten(given[name])}, expected {error}")
        for name in keys:
            if name in values and not keys[name].needs(values):
                errors.append(f"{name} has no effect {keys[name].without}")
        if errors:
            raise ValueError("; ".join(errors))
        return cls(**values)


def _record(key: Field[Any]) -> FilterKey:
    record: FilterKey = key.metadata["key"]
    return record


def _read_validation(value: Any) -> Filters:
    if not isinstance(value, Mapping):
        raise ValueError("lines of the form key: value")
    if "validation" in value:
        raise ValueError("no validation inside of it")
    try:
        return Filters.of_mapping(value)
    except ValueError as error:
        raise ValueError(f"filters: {error}") from error
