"""The command line: `editor` opens the graph editor on the embedded host, `compare` prints where the embedded host and
a ComfyUI differ, `types` writes the embedded host's modules into a folder for a type checker.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from functools import partial
from pathlib import Path

from .compare import NotComfyUI, as_json, compare, report
from .editor import serve
from .host_error import HostError
from .opening import open_host
from .type_checking import NotWritten, write_modules

INSTALL_EDITOR = f"install what it needs: {sys.executable} -m pip install 'comfyui-api-stubs[editor]'"


def command_name() -> str:
    """The command as it was typed: the script, or python -m with the package, which is in Graft as well."""
    typed = Path(sys.argv[0])
    return f"python -m {__package__}" if typed.name == Path(__file__).name else typed.stem


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run it; returns the exit status: 0, 1 when a workflow had to be cut off, 2 when
    something is missing or not what it should be, 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog=command_name(), description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    comparing = commands.add_parser("compare", help="print where the embedded host and a real ComfyUI differ")
    comparing.add_argument("--comfyui", required=True, metavar="PATH", help="folder of a ComfyUI checkout")
    comparing.add_argument("--json", action="store_true", help="print JSON")
    editing = commands.add_parser("editor", help="open the graph editor (ComfyUI's front end) on the embedded host")
    editing.add_argument("--pack", metavar="DIR", action="append", default=[], help="load a node pack (repeatable)")
    editing.add_argument("--listen", default="127.0.0.1", metavar="ADDRESS", help="listen there (default: %(default)s)")
    editing.add_argument("--port", type=int, default=8188, help="the port; 0 takes any free one (default: %(default)s)")
    editing.add_argument("--front-end-root", metavar="DIR", help="serve the front end in this folder")
    editing.add_argument("--no-browser", action="store_true", help="do not open a browser")
    typing = commands.add_parser("types", help="write the modules into a folder, for mypy: MYPYPATH=FOLDER mypy …")
    typing.add_argument("folder", metavar="FOLDER", help="a new or empty folder, or one that this command wrote")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "editor":
            return edit(arguments)
        if arguments.command == "types":
            print(write_modules(arguments.folder))
        else:
            found = compare(arguments.comfyui)
            print(as_json(found) if arguments.json else report(found))
    except (HostError, NotComfyUI, NotWritten) as error:
        print(f"comfyui_api_stubs: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("comfyui_api_stubs: stopped", file=sys.stderr)
        return 130
    return 0


def edit(arguments: argparse.Namespace) -> int:
    """Serve the editor in the current folder until Ctrl-C."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    front_end = serve.find_front_end(arguments.front_end_root, INSTALL_EDITOR)
    with contextlib.closing(serve.listen(arguments.listen, arguments.port)) as listening:
        host = open_host(arguments.pack)
        has_stopped = serve.serve(
            host, front_end, listening, arguments.listen, not arguments.no_browser, partial(print, flush=True)
        )
    return 0 if has_stopped else 1


if __name__ == "__main__":
    sys.exit(main())
