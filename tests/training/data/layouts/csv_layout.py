"""A made-up dataset layout in one file of its own: `captions.csv` with the columns file, caption and repeats."""

import csv

from graft_nodes.training.data.captions import WrittenCaption
from graft_nodes.training.data.layouts.layout import CaptionReader, DatasetLayout

NAME = "captions.csv"


class CsvCaptions(CaptionReader):
    def __init__(self, folder):
        self._captions, problems = {}, []
        with open(folder / NAME, encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                if not (folder / row["file"]).is_file():
                    problems.append(
                        f"{NAME}: line {number} names {row['file']!r}, which is not a file; correct its name"
                    )
                    continue
                caption = WrittenCaption(lines=(row["caption"],), found=True, multiply=float(row["repeats"]))
                self._captions[folder / row["file"]] = caption
        self.problems = tuple(problems)
        self.listed_images = frozenset(self._captions)

    def read(self, image):
        return self._captions.get(image)


def _open(folder, filters, chosen):
    if (folder / NAME).is_file():
        return CsvCaptions(folder)
    return CaptionReader()


LAYOUT = DatasetLayout(
    name="csv",
    title="a CSV file of captions",
    hint="captions.csv with file, caption and repeats",
    documentation="`captions.csv` with the columns file, caption and repeats.",
    suffixes=(".csv",),
    recognize=lambda folder: (folder / NAME).is_file(),
    open=_open,
    unlisted_reason="that captions.csv does not list",
)
