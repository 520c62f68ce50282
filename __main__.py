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


def _not_a_module() -> str:
    """Why `python __main__.py` and `python FOLDER` do not run, and what does."""
    folder = os.path.dirname(os.path.abspath(__file__))
    parent, name = os.path.split(folder)
    message = (
        f"graft_nodes: {__file__} is a part of a package and does not run by itself. Install the package once,\n"
        f'  {_quoted(sys.executable)} -m pip install -e "{folder}[standalone]"\n'
        "and run `graft`, or run the folder as a module:\n"
    )
    if "." in name:
        renamed = name.replace(".", "_")
        message += f'  rename it to "{renamed}", as a module has no dot in its name, then '
        return message + _as_module(parent, renamed)
    return f"{message}  {_as_module(parent, name)}"


def _as_module(parent: str, name: str) -> str:
    words = (sys.executable, "-m", name, *(sys.argv[1:] or ["doctor"]))
    return f'cd "{parent}" && {" ".join(map(_quoted, words))}\n'


def _quoted(word: str) -> str:
    """A word as every shell takes it for one."""
    return f'"{word}"' if " " in word else word


def _leave_current_folder() -> None:
    """Remove the current folder from sys.path, so that a file there with the name of a host module is not imported
    instead.
    """
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has no such flag
        sys.path[:1] = [entry for entry in sys.path[:1] if entry not in ("", os.getcwd())]


if __name__ == "__main__":
    if not __package__:
        sys.exit(_not_a_module())
    _leave_current_folder()
    sys.exit(main())
