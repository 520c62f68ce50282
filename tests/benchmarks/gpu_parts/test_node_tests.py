"""What pytest prints while it runs, read in both of its forms."""

from gpu_parts.node_tests import read

ALONE = """
collecting ... collected 5 items
tests/nodes/test_a.py::test_one PASSED                                   [ 20%]
tests/nodes/test_a.py::test_two[in words-1] FAILED                       [ 40%]
tests/nodes/test_a.py::test_three SKIPPED (could not import 'peft')      [ 60%]
tests/nodes/test_a.py::test_four ERROR                                   [ 80%]
tests/nodes/test_a.py::test_five
"""
WORKERS = """
[gw1] [ 20%] PASSED tests/nodes/test_a.py::test_one
tests/nodes/test_a.py::test_two[in words-1]
[gw0] [ 40%] FAILED tests/nodes/test_a.py::test_two[in words-1]
[gw0] [ 60%] SKIPPED tests/nodes/test_a.py::test_three
[gw0] [ 80%] ERROR tests/nodes/test_a.py::test_four
FAILED tests/nodes/test_a.py::test_two[in words-1] - assert 1 == 2
"""


def test_both_forms_say_the_same():
    for output in (ALONE, WORKERS):
        counts, failed = read(output)
        assert counts == {"PASSED": 1, "FAILED": 1, "SKIPPED": 1, "ERROR": 1}
        assert failed == ["tests/nodes/test_a.py::test_two[in words-1]", "tests/nodes/test_a.py::test_four"]
