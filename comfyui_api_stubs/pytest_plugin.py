"""`pytest --comfy-pack FOLDER`: loads a node pack on the embedded host, checks every node, runs its example workflows.
Tests of the pack get the pack as the fixture `comfy_pack`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .packs import Pack

PACK = pytest.StashKey["Pack"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --comfy-pack."""
    group = parser.getgroup("comfyui_api_stubs", "ComfyUI node packs")
    group.addoption(
        "--comfy-pack",
        metavar="FOLDER",
        help="load this node pack on the embedded host, check every node and run its example workflows; name test"
        " files as well to run those with the fixture comfy_pack",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Open the host and load the pack, before tests import anything of ComfyUI."""
    folder = config.getoption("--comfy-pack")
    if folder is None:
        return
    from .packs import CannotRun, Pack

    path = Path(config.invocation_params.dir, folder)
    if not path.exists():
        raise pytest.UsageError(f"--comfy-pack: there is no {path}")
    base = tempfile.TemporaryDirectory(prefix="comfy_pack_", ignore_cleanup_errors=True)
    config.add_cleanup(base.cleanup)
    try:
        config.stash[PACK] = Pack(path, Path(base.name))
    except CannotRun as error:
        raise pytest.UsageError(f"--comfy-pack: {error}") from error
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []  # nothing else was named


@pytest.hookimpl(tryfirst=True)  # before -k chooses among them
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the pack's own checks."""
    pack = config.stash.get(PACK, None)
    if pack is not None:
        own = list(checks(session, pack))
        items += own
        # What pytest counts as collected.
        session.ihook.pytest_collectreport(report=pytest.CollectReport("comfy-pack", "passed", None, list(own)))


def checks(session: pytest.Session, pack: Pack) -> Iterator[pytest.Item]:
    """One for the pack, one for each node, one for each workflow."""
    yield PackLoads.from_parent(session, name="pack::loads", pack=pack)
    for node_id in pack.nodes:
        yield NodeIsValid.from_parent(session, name=f"node::{node_id}", pack=pack, node_id=node_id)
    for path in pack.workflows():
        name = path.relative_to(pack.path).as_posix() if pack.path.is_dir() else path.name
        yield WorkflowRuns.from_parent(session, name=f"workflow::{name}", pack=pack, workflow=path)


class PackCheck(pytest.Item):
    """A check of a pack; what the pack did wrong is told without this plugin's own stack."""

    def __init__(self, *, pack: Pack, **kwargs: Any):
        super().__init__(**kwargs)
        self.pack = pack

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from .packs import Failed

        if isinstance(excinfo.value, Failed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.pack.path, None, self.name


class PackLoads(PackCheck):
    """The pack can be imported and has nodes."""

    def runtest(self) -> None:
        self.pack.check_loaded()


class NodeIsValid(PackCheck):
    """A node's inputs, outputs and function fit together."""

    def __init__(self, *, node_id: str, **kwargs: Any):
        super().__init__(**kwargs)
        self.node_id = node_id

    def runtest(self) -> None:
        self.pack.check_node(self.node_id)


class WorkflowRuns(PackCheck):
    """An example workflow runs to its end; skipped when it needs what is not here."""

    def __init__(self, *, workflow: Path, **kwargs: Any):
        super().__init__(**kwargs)
        self.workflow = workflow

    def runtest(self) -> None:
        from .packs import CannotRun

        try:
            self.pack.run(self.pack.prompt(self.workflow))
        except CannotRun as reason:
            pytest.skip(f"{self.name.partition('::')[2]}: {reason}")  # pytest's summary says no name


@pytest.fixture(scope="session")
def comfy_pack(request: pytest.FixtureRequest) -> Any:
    """The pack of --comfy-pack: `comfy_pack.nodes` are its classes, `comfy_pack.run(prompt)` runs an API workflow."""
    pack = request.config.stash.get(PACK, None)
    if pack is None:
        pytest.skip("no --comfy-pack was given")
    return pack
