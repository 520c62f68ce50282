"""The command line: `compare` prints where the embedded host and a ComfyUI differ, `types` writes the embedded host's
modules into a folder for a type checker.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .compare import NotComfyUI, as_json, compare, report
from .type_checking import NotWritten, write_modules


def command_name() -> str:
    """The command as it was typed: the script, or python -m with the package, which is in Graft as well."""
    typed = Path(sys.argv[0])
    return f"python -m {__package__}" if typed.name == Path(__file__).name else typed.stem


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run it; returns the exit status: 0, 2 when a folder is not what it should be, 130
    after Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog=command_name(), description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    comparing = commands.add_parser("compare", help="print where the embedded host and a real ComfyUI differ")
    comparing.add_argument("--comfyui", required=True, metavar="PATH", help="folder of a ComfyUI checkout")
    comparing.add_argument("--json", action="store_true", help="print JSON")
    typing = commands.add_parser("types", help="write the modules into a folder, for mypy: MYPYPATH=FOLDER mypy …")
    typing.add_argument("folder", metavar="FOLDER", help="a new or empty folder, or one that this command wrote")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "types":
            print(write_modules(arguments.folder))
        else:
            found = compare(arguments.comfyui)
            print(as_json(found) if arguments.json else report(found))
    except (NotComfyUI, NotWritten) as error:
        print(f"comfyui_api_stubs: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("comfyui_api_stubs: stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
