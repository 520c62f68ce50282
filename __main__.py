"""python -m graft_nodes: the command line (run, plan, editor, doctor)."""

import os
import sys


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run it; returns the exit status."""
    from .headless import signals

    try:
        with signals.stopping():  # the imports take seconds
            from .headless.command import main as command
        return command(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return signals.say_stopped()


def _leave_current_folder() -> None:
    """Remove the current folder from sys.path, so that a file there with the name of a host module is not imported
    instead.
    """
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has no such flag
        sys.path[:1] = [entry for entry in sys.path[:1] if entry not in ("", os.getcwd())]


if __name__ == "__main__":
    _leave_current_folder()
    sys.exit(main())
