"""A part whose cases end in every way there is."""

import os

from gpu_parts.case import CHECKED, CannotRun, Case, CutShort, at_least, at_most, row


def good():
    yield row("one", 1.0, "s", at_most(1.0))
    yield row("two", 2.0, "s", at_most(0.5), 0.5, "a ratio")


def cannot():
    raise CannotRun("there is one GPU")


def wrong():
    yield row("half", 0.5, "s", CHECKED)
    assert 1 == 2, "one is not two"


def dies():
    os._exit(3)
    yield


def short():
    yield row("part", 1.0, "tests", CHECKED)
    raise CutShort("1 of 2 tests ran")


def cases(setting):
    return [Case(run.__name__, run) for run in (good, cannot, wrong, dies, short, good_again, slow)]


def good_again():
    yield row("three", 3.0, "s", CHECKED)


def slow():
    yield row("twice", 2.0, "s", at_most(1.1))
    yield row("hidden", 1.0, "s", at_least(0.8), 0.5)
