"""Compares every public function, class and method of the embedded host with the real ComfyUI's: there, and with the
same parameters.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import importlib
import importlib.util
import inspect
import os
import types
from collections.abc import Iterator

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
STUBS = os.path.join(ROOT, "comfyui_api_stubs", "modules")

# What differs on purpose: "module:name" (with * and ?) -> why. Nothing else may.
DIFFERENT = {
    "nodes:Primitive*": (
        "ComfyUI keeps the primitives in comfy_extras, as String, Int, …; the node ids are the same (test_core_nodes)"
    ),
    "nodes:PreviewAny*": "ComfyUI keeps it in comfy_extras; the node id is the same (test_core_nodes)",
    "nodes:init_builtin_extra_nodes": "the same in ComfyUI",
    "nodes:RebatchImages*": "ComfyUI keeps it in comfy_extras; the node id is the same (test_core_nodes)",
    "comfy_execution.caching:*": "inside of the executor, which ComfyUI divides otherwise",
    "execution:PromptExecutor.note_expansion": "internal: ComfyUI notes it in its ExecutionList",
    "execution:get_input_data": "called by nobody outside of the executor; ComfyUI's differs between versions too",
    "execution:PromptExecutor.__init__": "0.3.64 has cache_size, 0.33.0 cache_args",
    "server:PromptServer.app": "an attribute in ComfyUI",
    "execution:ExecutionStatus": "inside of PromptQueue in ComfyUI",
    "execution:PromptQueue.task_done": "0.3.64 has no process_item",
    "execution:PromptQueue.interrupt_if_running": "absent in 0.3.64",
    "server:Route*": "ComfyUI's routes are aiohttp's table",
    "comfy_execution.graph:WaitingNodes*": "which node runs next; ComfyUI's ExecutionList does it otherwise",
    "comfy_execution.graph:DynamicPrompt.__init__": "no ephemeral nodes",
    "comfy_api.latest._io:_ComfyNodeBaseInternal.*": "internal",
    "comfy_api.latest._io:*.PREPARE_CLASS_CLONE": "0.3.64 takes the hidden inputs, 0.33.0 v3_data; both take None",
    "comfy_api.latest._io:HiddenHolder.*": "internal: filled in by the executor",
    "comfy_api.latest._io:add_to_dict_v1": "the second parameter is named differently in 0.3.64",
    "comfy_api.latest._io:MatchType.Output.__init__": "0.3.64 has the id first",
    "folder_paths:is_within_directory": "absent in 0.3.64",
    "comfy.cli_args:LatentPreviewMethod.from_string": "absent in 0.3.64",
    "comfy.hooks:refuse": "the embedded host has no hooks, and says so",
    "comfy.model_base:BaseModel.state_dict_for_saving": "0.33.0 wants the UNet's state dict first",
    "comfy.model_patcher:ModelPatcher.prepare_state": "0.3.64 takes the timestep only",
    "comfy.ops:CastWeightBiasOp.*": "ComfyUI's layers define them one by one",
    "comfy.ops:pick_operations": "the last parameter is scaled_fp8 in 0.3.64, model_config in 0.33.0",
    "latent_preview:set_preview_method": "absent in 0.3.64",
    "latent_preview:Latent2RGBPreviewer.__init__": "0.33.0 has one more parameter",
}


# The embedded host's comfy_api is 0.33.0's. An older one may lack names and parameters of it, and has none beside.
NEWER = "comfy_api"
FOLLOWED = (0, 33, 0)


def is_older() -> bool:
    """Whether the open ComfyUI is older than the one that the embedded host's comfy_api follows."""
    version = importlib.import_module("comfyui_version").__version__
    return tuple(int(part) for part in version.split(".")) < FOLLOWED


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The names of a stub's parameters, without self, cls and the catch-alls."""
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"], ["s"]) else names


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, list[str] | None]]:
    """(name, parameters or None for a class) of everything public that a module defines, methods included."""
    for node in getattr(tree, "body", []):
        name = getattr(node, "name", "_")
        if isinstance(node, ast.ClassDef) and not name.startswith("_"):
            yield prefix + name, None
            yield from definitions(node, f"{prefix}{name}.")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            not name.startswith("_") or name == "__init__"
        ):
            decorators = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
            yield prefix + name, None if decorators & {"property", "classproperty", "setter"} else parameters(node)


def stub_modules() -> dict[str, ast.Module]:
    """Every module of the embedded host by name."""
    found = {}
    for folder, _, files in os.walk(STUBS):
        for file in files:
            if file.endswith(".py"):
                path = os.path.join(folder, file)
                name = os.path.relpath(path, STUBS)[: -len(".py")].replace(os.sep, ".").removesuffix(".__init__")
                with open(path, encoding="utf-8") as source:
                    found[name] = ast.parse(source.read())
    return found


def real_parameters(found: object) -> tuple[list[str], set[str]] | None:
    """(names, those without a default) of a real function, without self, cls and the catch-alls; None when it has no
    signature.
    """
    function = inspect.unwrap(getattr(found, "__func__", found))  # type: ignore[arg-type]
    if not isinstance(function, types.FunctionType):
        return None
    listed = list(inspect.signature(function).parameters.values())
    listed = listed[1:] if listed and listed[0].name in ("self", "cls", "s") else listed
    listed = [
        parameter for parameter in listed if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    return [parameter.name for parameter in listed], {
        parameter.name for parameter in listed if parameter.default is parameter.empty
    }


def is_subsequence(some: list[str], all_names: list[str]) -> bool:
    rest = iter(all_names)
    return all(name in rest for name in some)


def compare(module: object, name: str, stub: list[str] | None) -> str | None:
    """What is wrong with one definition of the embedded host, if anything."""
    found: object = module
    for part in name.split("."):
        found = inspect.getattr_static(found, part, None) if part == "__init__" else getattr(found, part, None)
        if found is None:
            is_newer = getattr(module, "__name__", "").startswith(NEWER) and is_older()
            return None if is_newer else "is not in ComfyUI"
    if stub is None:
        return None
    real = real_parameters(found)
    if real is None:
        return None
    names, required = real
    if getattr(module, "__name__", "").startswith(NEWER) and is_older():
        return None if is_subsequence(names, stub) else f"has parameters {stub}, ComfyUI's are {names}"
    if not is_subsequence(stub, names):
        return f"has parameters {stub}, ComfyUI's are {names}"
    if lacking := required - set(stub):
        return f"lacks {sorted(lacking)}, which ComfyUI requires"
    return None


MODULES = stub_modules()


@pytest.mark.parametrize("name", sorted(MODULES))
def test_module(name, host):
    if name.startswith(NEWER) and is_older() and importlib.util.find_spec(name) is None:
        pytest.skip(f"this ComfyUI has no {name} yet")
    real = importlib.import_module(name)
    assert not os.path.abspath(real.__file__ or "").startswith(STUBS), "the embedded host is open, not a real ComfyUI"
    problems = []
    for definition, stub in definitions(MODULES[name]):
        if any(fnmatch.fnmatchcase(f"{name}:{definition}", pattern) for pattern in DIFFERENT):
            continue
        problem = compare(real, definition, stub)
        if problem is not None:
            problems.append(f"{name}:{definition} {problem}")
    assert not problems, "\n".join(problems)


def test_schema_fields(host):
    """Every field of the embedded Schema is one of ComfyUI's, and the order is ComfyUI's; an older one has fewer."""
    real = [field.name for field in dataclasses.fields(importlib.import_module("comfy_api.latest").io.Schema)]
    (stub,) = [node for node in MODULES["comfy_api.latest._io"].body if getattr(node, "name", "") == "Schema"]
    names = [node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)]
    assert is_subsequence(real, names) if is_older() else is_subsequence(names, real)


def test_every_difference_is_used():
    known = [f"{module}:{name}" for module, tree in MODULES.items() for name, _ in definitions(tree)]
    idle = [
        pattern
        for pattern in DIFFERENT
        if not fnmatch.filter(known, pattern) and "._" not in pattern and ":_" not in pattern
    ]
    assert not idle
