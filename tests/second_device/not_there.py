"""Node tests that do not run on the second device, and why: how the node id of each begins, and the reason."""

TESTS: dict[str, str] = {}
