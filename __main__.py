"""python -m graft_nodes: run workflows and look at the host without a browser."""

import sys


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run it; returns the exit status."""
    from .headless.command import main as command

    return command(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
