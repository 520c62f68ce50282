"""The command line: odd options, files and --set, up to the run itself; a status of four, errors on standard error,
--json always JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from .damage import damaged_bytes, damaged_json, text_of
from .engine import Target
from .workflows import API, EDITOR, assignments, texts

FILES = (
    "workflow.json",
    "missing.json",
    "folder",
    "",
    "-",
    "a\0b",
    "x" * 300,
    "..",
    "/dev/null",
    "\udcff.json",
    "--set",
)
PLACES = ("", ".", "folder", "workflow.json", "missing", "a\0b", "~", "~nobody", "/", "x" * 5000, "\udcff")
ADDRESSES = ("127.0.0.1", "", "::1", "::", "256.1.1.1", "nowhere.invalid", "a\0b", "x" * 300, "\udcff")
NUMBERS = ("0", "-1", "65536", "99999999999999999999", "1.5", "x", "")


class Arguments(Target):
    """See above."""

    name = "arguments"

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        os.chdir(place)
        (place / "folder").mkdir()
        from graft_nodes.headless import command, hosts, run
        from graft_nodes.headless.embedded import HostError

        host = hosts.open_host(hosts.Choice(None, "fuzzing"), True, str(place / "folder"), str(place / "output"))

        def opened(choice: Any, cpu: bool, given: str | None, output: str | None) -> Any:
            if output is not None:
                hosts.folder_named(output, "--output")
            if (
                self.editing
                or choice.root is not None
                or (given is not None and not hosts.folder_named(given, "--input").is_dir())
            ):
                raise HostError(f"not opened: {given}")
            return host

        hosts.open_host = opened
        run.execute = lambda *_, **__: run.Result()
        self.command, self.editing = command, False

    def cases(self) -> st.SearchStrategy[Any]:
        """(arguments, the bytes of workflow.json)."""
        shared = st.one_of(
            st.sampled_from(
                (["--json"], ["--cpu"], ["--verbose"], ["--embedded"], ["--custom-nodes"], ["--jso"], ["--"], ["-x"])
            ),
            *[
                st.sampled_from(PLACES).map(lambda place, option=option: [option, place])
                for option in ("--input", "--output", "--comfyui", "--front-end-root")
            ],
            st.sampled_from(ADDRESSES).map(lambda address: ["--listen", address]),
            st.sampled_from(NUMBERS).map(lambda port: ["--port", port]),
            st.text(max_size=6).map(lambda text: [text]),
        )
        options = st.lists(shared, max_size=3).map(lambda found: [one for of in found for one in of])
        file = st.one_of(st.just("workflow.json"), st.just("workflow.json"), st.sampled_from(FILES)).map(
            lambda name: [name]
        )
        sets = assignments().map(lambda values: [one for value in values for one in ("--set", value)])
        runs = st.builds(lambda *parts: ["run", *[one for part in parts for one in part]], file, sets, options)
        others = st.builds(
            lambda name, more: [name, *more], st.sampled_from(("editor", "editor", "doctor", "", "runn", "-h")), options
        )
        trees = [*texts(API), *texts(EDITOR)]
        bodies = st.one_of(
            damaged_json(trees, 3).map(text_of),
            st.sampled_from(trees).map(str.encode),
            damaged_bytes([trees[0].encode()]),
        )
        return st.tuples(st.one_of(runs, runs, runs, others), bodies)

    def attempt(self, case: Any) -> None:
        """As a shell would call it."""
        argv, body = case
        (self.place / "workflow.json").write_bytes(body)
        self.editing = argv[:1] == ["editor"]
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace"))
        status: Any = None
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status = self.command.main(argv)
        except SystemExit as error:
            status = error.code
        out.flush(), err.flush()
        told, complained = out.buffer.getvalue().decode(), err.buffer.getvalue().decode()  # type: ignore[attr-defined]
        assert status in (0, 1, 2), f"status {status}"
        assert status == 0 or complained.strip() or told.strip(), f"status {status} without a word"
        assert "Traceback" not in complained, complained
        if argv[:1] == ["run"] and "--json" in argv and told.strip() and status != 2:
            json.loads(told.splitlines()[-1])
        if status:
            raise ValueError(complained[-500:])

    def close(self) -> None:
        """Leave the folder."""
        os.chdir(self.place.parent.parent)
