"""EveryDream2's files beside pictures: `name.yaml` of one, `local.yaml` of a folder, `global.yaml` of all below,
`multiply.txt` and so on.

Keys and how they lie over each other are those of its `data/dataset.py` and SHUFFLING_TAGS.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .. import filters
from ..captions import Written, read_lines
from ..tags import split

_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True)
class Said:
    """What one file says; None and empty where it says nothing. A layer of `laid`."""

    main: str = ""
    tags: tuple[tuple[str, float], ...] = ()
    found: bool = False
    multiply: float | None = None
    cond_dropout: float | None = None
    flip_p: float | None = None
    shuffle_tags: bool | None = None
    batch_id: str | None = None
    loss_scale: float | None = None
    max_caption_length: int | None = None
    notes: tuple[str, ...] = ()

    def laid(self, over: Said) -> Said:
        """This with `over` on top: its values win, its tags come first."""
        values: dict[str, Any] = {
            f.name: getattr(self, f.name) if getattr(over, f.name) in (None, "") else getattr(over, f.name)
            for f in fields(self)
        }
        values["tags"] = tuple(
            {**dict(over.tags), **{tag: weight for tag, weight in self.tags if tag not in dict(over.tags)}}.items()
        )
        values["found"] = self.found or over.found
        values["notes"] = self.notes + tuple(note for note in over.notes if note not in self.notes)
        return replace(self, **values)


@dataclass
class Files:
    """Reads the files of the folders below one, each of them once; `problems` are said in the end."""

    folder: Path
    encoding: str = "utf-8"
    problems: list[str] = field(default_factory=list)
    _folders: dict[Path, tuple[Said, Said]] = field(default_factory=dict)

    def around(self, picture: Path, text: Written | None, own: bool) -> Written:
        """What is said of a picture by its folders, by its own YAML (with `own`) and by its text, the nearest on top.

        Raises ValueError when its own YAML cannot be used.
        """
        above, local = self._of(picture.parent)
        settings = above.laid(local)
        if own:
            mine = self._own(picture)
        else:
            mine = Said()
        found = (text is not None and text.found) or mine.found
        if text is not None and not (mine.found or settings.main or settings.tags):
            return _as_written(settings.laid(mine), text, found)
        if text is not None and text.found:
            parts = list(text.tags) or split(" ".join(text.lines))
            mine = Said(main=parts[0] if parts else "", tags=tuple((tag, 1.0) for tag in parts[1:])).laid(mine)
        merged = _as_written(settings.laid(mine), None, found or bool(settings.main))
        return replace(merged, score=None if text is None else text.score)

    def _own(self, picture: Path) -> Said:
        path = next(
            (path for path in (picture.with_suffix(ending) for ending in _ENDINGS) if os.path.isfile(path)), None
        )
        if path is None:
            return Said()
        return _read(path, self.encoding)

    def _of(self, folder: Path) -> tuple[Said, Said]:
        """(what holds for the folder and all below it, what holds for it alone)."""
        if folder not in self._folders:
            if folder == self.folder:
                above = Said()
            else:
                above = self._of(folder.parent)[0]
            for ending in _ENDINGS:
                above = above.laid(self._layer(folder / f"global{ending}"))
            local = Said()
            for ending in _ENDINGS:
                local = local.laid(self._layer(folder / f"local{ending}"))
            for name, reader in _TEXTS.items():
                local = local.laid(self._text(folder / f"{name}.txt", name, reader))
            self._folders[folder] = (above, local)
        return self._folders[folder]

    def _layer(self, path: Path) -> Said:
        if not path.is_file():
            return Said()
        try:
            return replace(_read(path, self.encoding), found=False)
        except ValueError as error:
            place = path.parent.relative_to(self.folder).as_posix()
            self.problems.append(f"{'' if place == '.' else place + '/'}{error}; not used")
            return Said()

    def _text(self, path: Path, name: str, reader: Callable[[str], Any]) -> Said:
        if not path.is_file():
            return Said()
        try:
            return Said(**{name: reader(" ".join(read_lines(path, self.encoding)))})
        except ValueError as error:
            self.problems.append(f"{path.relative_to(self.folder).as_posix()}: {error}; not used")
            return Said()


def _as_written(said: Said, text: Written | None, found: bool) -> Written:
    written = text or Written()
    if text is None:
        # EveryDream2 says tags of a greater weight first where they are not shuffled.
        tags = sorted(said.tags, key=lambda tag: -tag[1])
        main: tuple[str, ...] = ()
        if said.main:
            main = (said.main,)
        if len({weight for _, weight in tags}) > 1:
            weights = (*(1.0 for _ in main), *(weight for _, weight in tags))
        else:
            weights = ()
        written = Written(tags=(*main, *(tag for tag, _ in tags)), weights=weights, main=len(main))
    return replace(
        written,
        found=found,
        multiply=said.multiply,
        flip=said.flip_p,
        dropout=said.cond_dropout,
        shuffle=said.shuffle_tags,
        group=said.batch_id or "",
        loss_scale=said.loss_scale,
        max_length=said.max_caption_length or 0,
        notes=said.notes,
    )


def _read(path: Path, encoding: str) -> Said:
    """One YAML file; raises ValueError that lists everything wrong in it."""
    try:
        text = path.read_text(encoding="utf-8-sig" if encoding == "utf-8" else encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is not {encoding} text ({error.reason} at byte {error.start})") from error
    given = filters.load_mapping(text, path.name)
    problems: list[str] = []
    values: dict[str, Any] = {}
    notes: list[str] = []
    for key, value in given.items():
        if key in ("rating", "image"):
            notes.append(f"{key} in {path.name} is not used")
        elif key == "caption":
            if not isinstance(value, str | int | float):
                problems.append(f"caption is {filters.shown(value)}, expected one text")
                continue
            parts = split(str(value))
            values.update(main=parts[0] if parts else "", tags=tuple((tag, 1.0) for tag in parts[1:]), found=True)
        elif key not in _KEYS:
            problems.append(filters.unknown(str(key)[:80], set(_KEYS) | {"caption"}))
        else:
            name, reader = _KEYS[key]
            try:
                values[name] = reader(value)
                values["found"] = values.get("found", False) or name in ("main", "tags")
            except ValueError as error:
                problems.append(f"{key} is {filters.shown(value)}, expected {error}")
    if problems:
        raise ValueError(f"{path.name}: " + "; ".join(problems))
    return Said(**values, notes=tuple(notes))


def _main(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str | int | float):
        raise ValueError("one text")
    return " ".join(str(value).split())


def _tags(value: Any) -> tuple[tuple[str, float], ...]:
    out = []
    for one in value if isinstance(value, list) else [None]:
        if isinstance(one, dict):
            tag = one
        else:
            tag = {"tag": one}
        if not isinstance(tag.get("tag"), str | int | float) or not tag.keys() <= {"tag", "weight"}:
            raise ValueError("a list of tags, each a text or tag: and weight:")
        weight = tag.get("weight")
        out.append((" ".join(str(tag["tag"]).split()), 1.0 if weight is None else filters.number(weight, 0.0)))
    return tuple((tag, weight) for tag, weight in out if tag)


def _positive(value: Any) -> float:
    return filters.number(value, 0.0)


_KEYS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "main_prompt": ("main", _main),
    "tags": ("tags", _tags),
    "multiply": ("multiply", _positive),
    "cond_dropout": ("cond_dropout", filters.share),
    "flip_p": ("flip_p", filters.share),
    "shuffle_tags": ("shuffle_tags", filters.flag),
    "batch_id": ("batch_id", _main),
    "loss_scale": ("loss_scale", _positive),
    "max_caption_length": ("max_caption_length", filters.whole(1)),
}


def _text_number(most: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            return filters.number(float(text), 0.0, most)
        except ValueError:
            raise ValueError(
                f"is {text!r}, expected a number from 0" + (f" to {most:g}" if most < float("inf") else "")
            ) from None

    return read


_TEXTS: dict[str, Callable[[str], Any]] = {
    "multiply": _text_number(float("inf")),
    "cond_dropout": _text_number(1.0),
    "flip_p": _text_number(1.0),
    "loss_scale": _text_number(float("inf")),
    "batch_id": str,
    "shuffle_tags": lambda _: True,
}
