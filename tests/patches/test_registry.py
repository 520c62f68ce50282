"""The class behind every registry, and what all registries have in common."""

from dataclasses import dataclass

import pytest
from graft_nodes.patches.adapters.registry import KINDS
from graft_nodes.patches.lora_files.key_formats.registry import FORMATS
from graft_nodes.patches.models.registry import FAMILIES
from graft_nodes.patches.registry import Registry
from graft_nodes.training.data.layouts.registry import LAYOUTS
from graft_nodes.training.objective.loss_kinds import LOSSES
from graft_nodes.training.objective.timesteps import TIMESTEPS
from graft_nodes.training.objective.weightings import WEIGHTINGS
from graft_nodes.training.optimizers.registry import OPTIMIZERS

ALL = (KINDS, FORMATS, FAMILIES, LAYOUTS, LOSSES, TIMESTEPS, WEIGHTINGS, OPTIMIZERS)


@dataclass(frozen=True)
class Tool:
    name: str
    file: str = ""


@pytest.fixture
def tools():
    def same_file(tool):
        return [f"file {other.file}" for other in registry if other.file == tool.file]

    registry = Registry("tool", (Tool("saw", "saw.py"), Tool("knife", "knife.py")), duplicates=same_file)
    return registry


def test_a_record_is_listed_until_its_block_ends(tools):
    with tools.registered(Tool("axe", "axe.py")):
        assert tools.names() == ["saw", "knife", "axe"] and "axe" in tools and tools.get("axe").file == "axe.py"
    assert tools.names() == ["saw", "knife"]
    with pytest.raises(ValueError, match=r"^tool is 'axe', expected one of saw, knife$"):
        tools.get("axe")


def test_the_newest_may_come_first():
    tools = Registry("tool", (Tool("saw"), Tool("knife")), newest_first=True)
    with tools.registered(Tool("axe")):
        assert tools.names() == ["axe", "saw", "knife"]


def test_a_name_or_anything_else_is_taken_once(tools):
    with pytest.raises(ValueError, match="tool saw is already registered"):
        tools.register(Tool("saw", "other.py"))
    with pytest.raises(ValueError, match=r"tool axe: already registered: file saw\.py\."):
        tools.register(Tool("axe", "saw.py"))
    with pytest.raises(ValueError, match="tool saw is already registered"):
        Registry("tool", (Tool("saw"), Tool("saw")))
    assert tools.names() == ["saw", "knife"]


def test_a_derived_table_follows_the_records(tools):
    made = []

    @tools.derived
    def files():
        made.append(1)
        return [tool.file for tool in tools]

    assert files() == files() == ["saw.py", "knife.py"] and len(made) == 1
    with tools.registered(Tool("axe", "axe.py")):
        assert files()[-1] == "axe.py"
    assert files() == ["saw.py", "knife.py"]


@pytest.mark.parametrize("registry", ALL, ids=lambda registry: registry.title)
def test_what_is_built_in_passes_the_check_of_new_records(registry):
    """Records of the list itself are not compared while it is made; here each is taken out and registered again."""
    names = registry.names()
    order = list(registry)
    if registry is FAMILIES:
        order.reverse()
    for record in order:
        registry.unregister(record.name)
        registry.register(record)
    assert registry.names() == names
