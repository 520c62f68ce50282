"""The preview prompts of Train Step: a text with one prompt a line, which may end in the flags of kohya's
`sample_prompts`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..data.tags import has_trigger, replace_trigger

MOST = 16  # each is sampled at every preview, with the weights and again with their average
LONGEST = 4000  # characters; previews carry their prompt in their files
MOST_STEPS = 1000  # kohya's, too
LARGEST = 16384  # pixels, as in ComfyUI's empty latents
# As kohya: whatever begins so is a flag, also one that nobody knows, and no part of the prompt.
_FLAG = re.compile(r"(?:^|\s)--([A-Za-z]\S*)")


@dataclass(frozen=True)
class PromptLine:
    """A prompt, and what its flags set; None, 0 and "" are what previews use anyway.

    `negative` is the negative prompt, `cfg` the guidance with it, `guidance` the one that distilled models (Flux) are
    told, `sampler` and `scheduler` names of ComfyUI, `width` and `height` pixels. `unused` are the flags that previews
    do not follow, as they are written.
    """

    text: str = ""
    negative: str | None = None
    seed: int | None = None
    steps: int = 0
    cfg: float | None = None
    guidance: float | None = None
    sampler: str = ""
    scheduler: str = ""
    width: int = 0
    height: int = 0
    unused: tuple[str, ...] = ()

    @property
    def needed_negative(self) -> str | None:
        """The negative prompt that its flags ask for: guidance alone works against the empty one, as kohya's."""
        if self.negative is None and self.cfg is not None and self.cfg != 1.0:
            return ""
        return self.negative


PLAIN = PromptLine()  # without flags


def preview_prompts(text: str) -> list[PromptLine]:
    """The prompts of a text: its lines, without blank ones and those that start with #.

    Raises ValueError when there are too many, when one is too long, or for a flag with a wrong value.
    """
    lines = [line.strip() for line in text.splitlines()]
    prompts = [line for line in lines if line and not line.startswith("#")]
    if len(prompts) > MOST:
        raise ValueError(
            f"Train Step: more preview prompts has {len(prompts)} prompts, at most {MOST} are allowed: each is sampled"
            " at every preview. Delete some, or put a # in front of them."
        )
    read: list[PromptLine] = []
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt) > LONGEST:
            raise ValueError(
                f"Train Step: more preview prompts: prompt {number} has {len(prompt)} characters, at most {LONGEST} are"
                " allowed. Make it shorter."
            )
        try:
            read.append(_read_line(prompt))
        except ValueError as error:
            raise ValueError(f"Train Step: more preview prompts: prompt {number}: {error}.") from None
    return read


def _read_line(line: str) -> PromptLine:
    found = list(_FLAG.finditer(line))
    if not found:
        return PromptLine(line)
    values: dict[str, Any] = {}
    unused: list[str] = []
    ends = [match.start() for match in found[1:]] + [len(line)]
    for match, end in zip(found, ends, strict=True):
        flag, value = match[1].lower(), line[match.end() : end].strip()
        if flag not in _READERS:
            unused.append(f"--{match[1]} {value}".strip())
            continue
        name, read = _READERS[flag]
        try:
            values[name] = read(value)
        except ValueError as error:
            raise ValueError(f"--{flag} is {value[:40]!r}, expected {error}") from None
    return PromptLine(line[: found[0].start()].strip(), unused=tuple(dict.fromkeys(unused)), **values)


def _whole(low: int, high: int) -> Callable[[str], int]:
    def read(value: str) -> int:
        if not re.fullmatch(r"\d{1,20}", value) or not low <= int(value) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(value)

    return read


def _number(value: str) -> float:
    if not re.fullmatch(r"\d{1,4}(\.\d*)?|\.\d+", value):
        raise ValueError("a number from 0 to 9999")
    return float(value)


def _sampler(value: str) -> str:
    return _SAMPLERS.get(value.lower(), value)


# What kohya calls ComfyUI's samplers; other names are ComfyUI's own.
_SAMPLERS = {
    "euler_a": "euler_ancestral",
    "k_euler": "euler",
    "k_euler_a": "euler_ancestral",
    "k_lms": "lms",
    "k_dpm_2": "dpm_2",
    "dpm_2_a": "dpm_2_ancestral",
    "k_dpm_2_a": "dpm_2_ancestral",
    "dpmsolver++": "dpmpp_2m",
}
_READERS: Mapping[str, tuple[str, Callable[[str], Any]]] = {  # kohya's flag: (field of PromptLine, its reader)
    "n": ("negative", str),
    "d": ("seed", _whole(0, 2**63 - 1)),
    "s": ("steps", _whole(1, MOST_STEPS)),
    "l": ("cfg", _number),
    "g": ("guidance", _number),
    "ss": ("sampler", _sampler),
    "sc": ("scheduler", str),
    "w": ("width", _whole(16, LARGEST)),
    "h": ("height", _whole(16, LARGEST)),
}


def fill_trigger(prompts: Sequence[PromptLine], trigger: str) -> list[PromptLine]:
    """The prompts, and their negative ones, with the dataset's trigger word in place of `[trigger]`; as they are
    without a word.
    """
    if not trigger:
        return list(prompts)
    replaced: list[PromptLine] = []
    for prompt in prompts:
        negative = prompt.negative and replace_trigger(prompt.negative, trigger)
        replaced.append(replace(prompt, text=replace_trigger(prompt.text, trigger), negative=negative))
    return replaced


def notes(prompts: Sequence[PromptLine], trigger: str) -> list[str]:
    """What of the prompts is not followed, for the report: the same flags of several prompts once."""
    numbers_by_flags: dict[tuple[str, ...], list[int]] = {}
    for number, prompt in enumerate(prompts, start=1):
        numbers_by_flags.setdefault(prompt.unused, []).append(number)
    numbers_by_flags.pop((), None)
    lines = [
        f"{_named(numbers)}: {', '.join(flags)} {'is' if len(flags) == 1 else 'are'} not used"
        for flags, numbers in numbers_by_flags.items()
    ]
    with_word = [
        number
        for number, prompt in enumerate(prompts, start=1)
        if has_trigger(prompt.text) or has_trigger(prompt.negative or "")
    ]
    if with_word and not trigger:
        lines.append(
            f"{_named(with_word)}: [trigger] is not a word, as no Dataset has a trigger in its filters; write the word"
            " itself"
        )
    return lines


def _named(numbers: Sequence[int]) -> str:
    return f"preview prompt{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
