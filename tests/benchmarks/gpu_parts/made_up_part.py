"""A part whose cases end in every way there is."""

import os

from gpu_parts.case import CannotRun, Case, CutShort, row


def good():
    yield row("one", 1.0, "s")
    yield row("two", 2.0, "s", 0.5, "checked")


def cannot():
    raise CannotRun("there is one GPU")


def wrong():
    yield row("half", 0.5, "s")
    assert 1 == 2, "one is not two"


def dies():
    os._exit(3)
    yield


def short():
    yield row("part", 1.0, "tests")
    raise CutShort("1 of 2 tests ran")


def cases(setting):
    return [Case(run.__name__, run) for run in (good, cannot, wrong, dies, short, good_again)]


def good_again():
    yield row("three", 3.0, "s")
