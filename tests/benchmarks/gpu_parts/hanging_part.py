"""A part with a case that never ends."""

import time

from gpu_parts.case import Case, row


def good():
    yield row("one", 1.0, "s")


def hangs():
    yield row("before", 2.0, "s")
    time.sleep(1000)


def cases(setting):
    return [Case("good", good), Case("hangs", hangs), Case("never begun", good)]
