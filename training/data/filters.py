"""The YAML text of GraftDataset's `filters`: which pictures are taken, what becomes of their tags, crops, masks and the
cache.

The first ten keys are those of LunNova's loader (translunar-diffusion), the others Graft's own.
"""

from __future__ import annotations

import codecs
import difflib
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

CROPS = ("centre", "top", "random")
MASKS = ("files", "alpha", "both", "off")
SMALL = ("enlarge", "skip")
CHANGED = ("continue", "stop")


@dataclass(frozen=True)
class Filters:
    """What the YAML may say; plain values, checked by `parse`."""

    consider_every_nth: int = 1  # only every nth picture (JSON file), in the order of their names
    shuffle_tag_p: float | None = None  # how often the tags are shuffled; None is as the node says
    blacklist_tags: tuple[str, ...] = ()  # pictures with one of these are left out
    non_caption_tags: tuple[str, ...] = ()  # tags that are not said
    replacements: tuple[tuple[str, str], ...] = ()  # inside every tag, in this order
    tag_separator: str = ", "
    abs_min_score: float | None = None  # pictures whose score is below are left out
    min_score: float | None = None  # the same after tag_bonus_scores
    score_tags: tuple[int, ...] = ()  # the highest that the score reaches becomes a tag: scr800
    tag_bonus_scores: tuple[tuple[str, float], ...] = ()
    wildcards: bool = False  # {a|b} and one line of many, as kohya's enable_wildcard, and __name__ of word lists
    keep_separator: str = (
        ""  # between tags that neither move nor drop out and the others, as kohya's keep_tokens_separator
    )
    trigger: str = ""  # in the place of [trigger] in a caption, or in front of it, as AI-Toolkit's trigger_word
    caption_prefix: str = ""  # in front of every caption
    caption_suffix: str = ""  # behind it
    encoding: str = "utf-8"  # of caption files
    resolutions: tuple[
        int, ...
    ] = ()  # beside the node's: each picture is shown at each of them, as AI-Toolkit's list of resolutions
    crop: str = "centre"  # where a picture that is longer than its bucket is cut
    crops: int = 4  # how many places for crop random
    size_conditioning: bool = True  # original size, crop and target size for models that take them (SDXL)
    masks: str = "files"  # where masks of the loss come from
    small: str = "enlarge"  # what becomes of a picture smaller than its bucket
    changed: str = "continue"  # what happens when a file changes while training
    cache: bool = True  # keep latents and conditionings on disk
    cache_gb: float = 20.0  # how large that cache may grow
    write_schedule: bool = False  # a text file of which picture goes into which step
    workers: int = 0  # threads that prepare batches ahead; the result is the same with any number

    @property
    def scored(self) -> bool:
        """Whether pictures need a score."""
        return bool(
            self.abs_min_score is not None or self.min_score is not None or self.score_tags or self.tag_bonus_scores
        )

    def unwanted(self, tags: Sequence[str], score: float | None) -> str | None:
        """Why a picture with these tags and this score is left out, or None."""
        if self.scored and score is None:
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
        reached = [one for one in self.score_tags if score is not None and score >= one]
        if reached:
            return (f"scr{max(reached)}",)
        return ()

    @classmethod
    def parse(cls, text: str) -> Filters:
        """Filters of a YAML mapping; raises ValueError that lists every key that is unknown or has a wrong value."""
        given = load_mapping(text, "filters")
        problems: list[str] = []
        values: dict[str, Any] = {}
        names = {f.name for f in fields(cls)}
        for key, value in given.items():
            if key not in names:
                problems.append(unknown(str(key)[:80], names))
                continue
            try:
                values[key] = _READERS[key](value)
            except ValueError as error:
                problems.append(f"{key} is {shown(value)}, expected {error}")
        if "crops" in values and values.get("crop") != "random":
            problems.append("crops has no effect without crop: random")
        if "cache_gb" in values and not values.get("cache", True):
            problems.append("cache_gb has no effect with cache: false")
        if values.get("tag_bonus_scores") and "min_score" not in values:
            problems.append("tag_bonus_scores has no effect without min_score")
        if problems:
            raise ValueError("filters: " + "; ".join(problems))
        return cls(**values)


def load_mapping(text: str, where: str) -> dict[Any, Any]:
    """A YAML mapping by the safe loader; empty text is an empty one. Raises ValueError with line and column."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ValueError(f"{where}: reading YAML needs PyYAML, which ComfyUI installs: pip install PyYAML") from error
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is not None and _expanded(node, {}) > _LARGEST:
            raise ValueError(f"its aliases stand for more than {_LARGEST:,} values")
        if node is None:
            given = None
        else:
            given = loader.construct_document(node)
    except (*_UNREADABLE, yaml.YAMLError) as error:
        raise ValueError(f"{where} is not YAML: {' '.join(str(error).split()) or type(error).__name__}") from error
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ValueError(f"{where} is YAML of a {type(given).__name__}, expected lines of the form key: value")
    return given


_LARGEST = 100_000  # values in a mapping; its text may be short, as an alias may stand for many (a "billion laughs")
_UNREADABLE = (
    ValueError,
    KeyError,
    AttributeError,
    TypeError,
    OverflowError,
    RecursionError,
)  # PyYAML's, of `!!bool x`, a 99th day …


def _expanded(node: Any, known: dict[int, float]) -> float:
    """How many values a YAML node stands for with its aliases written out; infinitely many where it holds itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")
        if isinstance(node.value, list):
            parts = node.value
        else:
            parts = []
        known[id(node)] = 1 + sum(
            _expanded(one, known) for part in parts for one in (part if isinstance(part, tuple) else (part,))
        )
    return known[id(node)]


def shown(value: Any) -> str:
    """A wrong value for a message, cut short."""
    text = _BRIEF.repr(value)
    if len(text) <= 80:
        return text
    return f"{text[:79]}…"


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 2


def unknown(key: str, names: set[str]) -> str:
    """What to say of a key that is not known, with the nearest one that is."""
    near = difflib.get_close_matches(key, sorted(names), n=1)
    return f"unknown key {key!r}" + (
        f", did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(names))}"
    )


# --- readers of one value each: they raise ValueError that says what was expected -------------------------------------


def whole(least: int) -> Callable[[Any], int]:
    """A whole number from `least` on."""

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"a whole number, {least} or more")
        return value

    return read


def number(value: Any, least: float = float("-inf"), most: float = float("inf")) -> float:
    """A finite number from `least` to `most`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not least <= value <= most
        or not abs(value) < 1e300
    ):
        if least == float("-inf"):
            bounds = ""
        else:
            bounds = f" from {least:g}" + ("" if most == float("inf") else f" to {most:g}")
        raise ValueError(f"a number{bounds}")
    return float(value)


def share(value: Any) -> float:
    """A probability."""
    return number(value, 0.0, 1.0)


def flag(value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def one_of(*names: str) -> Callable[[Any], str]:
    """One of a few words."""

    def read(value: Any) -> str:
        # YAML 1.1 reads a bare off as false.
        if value is False and "off" in names:
            value = "off"
        if value not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return str(value)

    return read


def words(value: Any) -> tuple[str, ...]:
    """A list of texts; numbers are taken as they are written, one text is a list of one."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(one, str | int | float) for one in value):
        raise ValueError("a list of tags")
    return tuple(str(one) for one in value)


def _pairs(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, Mapping) or not all(isinstance(one, str | int | float) for one in value.values()):
        raise ValueError("lines of the form 'old': 'new'")
    if "" in value:
        raise ValueError("something to replace, not an empty text")
    return tuple((str(old), str(new)) for old, new in value.items())


def _scores(value: Any) -> tuple[tuple[str, float], ...]:
    if not isinstance(value, Mapping):
        raise ValueError("lines of the form tag: number")
    try:
        return tuple((str(tag), number(score)) for tag, score in value.items())
    except ValueError:
        raise ValueError("lines of the form tag: number") from None


def _thresholds(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        raise ValueError("a list of whole numbers")
    return tuple(value)


def _sides(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        isinstance(one, int) and not isinstance(one, bool) and 64 <= one <= 8192 for one in value
    ):
        raise ValueError("a list of whole numbers from 64 to 8192")
    return tuple(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a text in quotes")
    return value


def _encoding(value: Any) -> str:
    try:
        name = codecs.lookup(_text(value)).name
        "a".encode(name)  # some are of bytes, not of text
        return name
    except (LookupError, UnicodeError):
        raise ValueError("the name of a text encoding, as utf-8 or cp1252") from None


_READERS: dict[str, Callable[[Any], Any]] = {
    "consider_every_nth": whole(1),
    "shuffle_tag_p": share,
    "blacklist_tags": words,
    "non_caption_tags": words,
    "replacements": _pairs,
    "tag_separator": _text,
    "abs_min_score": number,
    "min_score": number,
    "score_tags": _thresholds,
    "tag_bonus_scores": _scores,
    "wildcards": flag,
    "keep_separator": _text,
    "trigger": _text,
    "caption_prefix": _text,
    "caption_suffix": _text,
    "encoding": _encoding,
    "resolutions": _sides,
    "crop": one_of(*CROPS),
    "crops": whole(2),
    "size_conditioning": flag,
    "masks": one_of(*MASKS),
    "small": one_of(*SMALL),
    "changed": one_of(*CHANGED),
    "cache": flag,
    "cache_gb": lambda value: number(value, 0.001),
    "write_schedule": flag,
    "workers": whole(0),
}
