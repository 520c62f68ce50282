"""The command line (run, plan, editor, doctor): python -m graft_nodes, or Python with this folder's path."""

import importlib
import importlib.util
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


def _leave_folders() -> None:
    """Remove the current folder and this one from sys.path, so that a file there with the name of a host module is not
    imported instead.
    """
    folders = ("", os.getcwd(), os.path.dirname(__file__), os.path.dirname(os.path.abspath(__file__)))
    if __package__ and getattr(sys.flags, "safe_path", False):  # Python 3.10 has no such flag
        return
    sys.path[:1] = [entry for entry in sys.path[:1] if entry not in folders]


def _load_folder() -> None:
    """Import this folder as the package graft_nodes, whatever the folder is called and wherever Python looks for
    packages: that of the Windows portable looks in its own folders alone.
    """
    folder = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.util.spec_from_file_location(
        "graft_nodes", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["graft_nodes"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    _leave_folders()
    if not __package__:  # Python was given the folder's path, or this file's
        _load_folder()
        main = importlib.import_module("graft_nodes.__main__").main
    sys.exit(main())
