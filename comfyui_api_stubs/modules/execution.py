"""Validates and executes workflows in API format, with ComfyUI's semantics: lists, lazy inputs, async nodes, nodes that
add nodes to the running graph ("node expansion"), caching, interruption.

One thing differs on purpose: validation lists every error instead of stopping at the first unknown node.
"""

from __future__ import annotations

import asyncio
import bisect
import copy
import inspect
import itertools
import logging
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import comfy.model_management
import latent_preview
import torch
from comfy_api.internal import (
    _ComfyNodeInternal,
    _NodeOutputInternal,
    first_real_override,
    is_class,
    make_locked_method_func,
)
from comfy_api.latest import _io, io
from comfy_execution.caching import GB, CacheEntry, ClassicCache, LRUCache, NoCache, RAMPressureCache
from comfy_execution.graph import (
    DependencyCycleError,
    DynamicPrompt,
    ExecutionBlocker,
    NodeInputError,
    NodeNotFoundError,
    WaitingNodes,
    get_input_info,
    is_link,
)
from comfy_execution.graph_utils import GraphBuilder
from comfy_execution.progress import (
    WebUIProgressHandler,
    add_progress_handler,
    get_progress_state,
    reset_progress_state,
)
from comfy_execution.utils import CurrentNodeContext
from comfy_execution.validation import validate_node_input

import nodes


class CacheType(Enum):
    """How long results are kept for later workflows."""

    CLASSIC = 0  # those of the latest workflow
    LRU = 1  # as many as cache_args["lru"] says, of several workflows
    NONE = 2
    RAM_PRESSURE = 3  # while cache_args["ram"] GB of memory are free


def _cache(cache_type: CacheType | bool, settings: Mapping[str, Any]) -> ClassicCache:
    """The cache that a type and its settings ask for."""
    if cache_type is CacheType.LRU:
        return LRUCache(settings.get("lru", 0))
    if cache_type is CacheType.NONE:
        return NoCache()
    if cache_type is CacheType.RAM_PRESSURE:
        active = settings.get("ram", 16.0)
        return RAMPressureCache(active * GB, settings.get("ram_inactive", active) * GB)
    return ClassicCache()


# --- one node ---------------------------------------------------------------------------------------------------------


def _is_v3(class_def: type) -> bool:
    return issubclass(class_def, _ComfyNodeInternal)


def _optional_method(obj: Any, v3_name: str, v1_name: str) -> str | None:
    """The name of a method that a node class may have: for V3 only when it is overridden."""
    class_def = obj if is_class(obj) else type(obj)
    if _is_v3(class_def):
        return v3_name if first_real_override(class_def, v3_name) is not None else None
    return v1_name if getattr(obj, v1_name, None) is not None else None


def _hidden_values(
    wanted: Mapping[str, Any], unique_id: str, prompt: DynamicPrompt | None, extra_data: Mapping[str, Any]
) -> dict:
    """The hidden inputs that a node class names, by the name it gives them."""
    known = {
        "PROMPT": prompt.original_prompt if prompt else {},
        "DYNPROMPT": prompt,
        "EXTRA_PNGINFO": extra_data.get("extra_pnginfo"),
        "UNIQUE_ID": unique_id,
        "AUTH_TOKEN_COMFY_ORG": extra_data.get("auth_token_comfy_org"),
        "API_KEY_COMFY_ORG": extra_data.get("api_key_comfy_org"),
        "COMFY_USAGE_SOURCE": extra_data.get("comfy_usage_source"),
    }
    kinds = {name: kind[0] if isinstance(kind, tuple) else kind for name, kind in wanted.items()}
    return {name: known[kind] for name, kind in kinds.items() if isinstance(kind, str) and kind in known}


class _InputTypes(dict):
    """What each node class says of its inputs, asked once a class in one validation or run."""

    def __init__(self) -> None:
        super().__init__()
        self._growing: set[Any] = set()  # the classes with inputs that stand for others

    def __missing__(self, class_def: Any) -> dict:
        self[class_def] = class_def.INPUT_TYPES()
        if _is_v3(class_def) and _grows(self[class_def]):
            self._growing.add(class_def)
        return self[class_def]

    def sent(self, class_def: Any, inputs: Mapping[str, Any]) -> tuple[dict, dict]:
        """(the inputs of a node that is sent these, how values are gathered for it) of a class; the latter is empty
        unless the class has inputs that grow.
        """
        spec = self[class_def]
        if class_def not in self._growing:
            return spec, {}
        grown, _, gathering = _io.get_finalized_class_inputs(spec, dict(inputs), include_hidden=True)
        return grown, gathering


def _grows(spec: Mapping[str, Mapping[str, tuple]]) -> bool:
    """Whether an input stands for others: an Autogrow, a DynamicCombo or a DynamicSlot."""
    declared = itertools.chain(spec.get("required", {}).values(), spec.get("optional", {}).values())
    return any(isinstance(entry[0], str) and entry[0] in _io.DYNAMIC_INPUT_LOOKUP for entry in declared)


def get_input_data(
    inputs: Mapping[str, Any],
    class_def: type,
    unique_id: str,
    outputs: Callable[[str], list[list] | None] | None = None,
    dynprompt: DynamicPrompt | None = None,
    extra_data: Mapping[str, Any] = {},
    input_types: _InputTypes | None = None,
) -> tuple[dict[str, Any], set[str], dict]:
    """(a list of values for each input, the inputs whose value is not there yet, V3's hidden values and how values
    are gathered into dicts).

    `outputs` gives what a node has computed, or None; without it only constants have values, the rest reads (None,).
    `input_types` are what classes have said already."""
    spec, gathering = (_InputTypes() if input_types is None else input_types).sent(class_def, inputs)
    hidden = _hidden_values(spec.get("hidden", {}), unique_id, dynprompt, extra_data)
    values: dict[str, Any] = {}
    missing: set[str] = set()
    for name, value in inputs.items():
        _, category, options = get_input_info(class_def, name, spec)
        if is_link(value) and not (options or {}).get("rawLink"):
            computed = outputs(value[0]) if outputs else None
            if computed is None or value[1] >= len(computed):
                missing.add(name)
                values[name] = (None,)
            else:
                values[name] = computed[int(value[1])]
        elif category is not None or (_is_v3(class_def) and getattr(class_def, "ACCEPT_ALL_INPUTS", False)):
            values[name] = [value]
    if _is_v3(class_def):
        hidden_inputs = {io.Hidden[name]: value for name, value in hidden.items()}
        return values, missing, {"hidden_inputs": hidden_inputs, **gathering}
    values.update({name: [value] for name, value in hidden.items()})
    return values, missing, {}


def _bound(obj: Any, function: str, v3_data: dict | None) -> Callable:
    """The function to call: of a V3 class on a locked clone of it, so that nothing can be kept on the class."""
    class_def = obj if is_class(obj) else type(obj)
    if not _is_v3(class_def):
        return getattr(obj, function)
    class_def.VALIDATE_CLASS()
    return make_locked_method_func(class_def, function, class_def.PREPARE_CLASS_CLONE(v3_data))


def _calls(values: Mapping[str, Any], as_lists: bool) -> list[dict[str, Any]]:
    """The arguments of each call: one call with whole lists, or one an entry, the last entry of
    shorter lists repeated.
    """
    if as_lists:
        return [dict(values)]
    count = max((len(value) for value in values.values()), default=0)
    if count == 0:
        return [{}]
    return [{name: value[min(index, len(value) - 1)] for name, value in values.items()} for index in range(count)]


def _blocker(arguments: Mapping[str, Any], as_lists: bool) -> ExecutionBlocker | None:
    """The first blocker among a call's arguments."""
    flat = itertools.chain.from_iterable(arguments.values()) if as_lists else arguments.values()
    return next((value for value in flat if isinstance(value, ExecutionBlocker)), None)


async def _call_over_lists(
    prompt_id: str,
    unique_id: str,
    obj: Any,
    values: Mapping[str, Any],
    function: str,
    v3_data: dict | None = None,
    interruptible: bool = False,
    on_block: Callable[[ExecutionBlocker], ExecutionBlocker] | None = None,
) -> list:
    """Call a node's function once for each entry of its input lists; what is still running is in the result
    as a task.
    """
    results: list[Any] = []
    as_lists = bool(getattr(obj, "INPUT_IS_LIST", False))
    for index, arguments in enumerate(_calls(values, as_lists)):
        if interruptible:
            nodes.before_node_execution()
        blocker = _blocker(arguments, as_lists)
        if blocker is not None:
            results.append(on_block(blocker) if on_block else blocker)
            continue
        call = _bound(obj, function, v3_data)
        arguments = _io.build_nested_inputs(arguments, v3_data or {})
        if interruptible:
            GraphBuilder.set_default_prefix(unique_id, index)
        with CurrentNodeContext(prompt_id, unique_id, index):
            if inspect.iscoroutinefunction(call):
                task = asyncio.ensure_future(call(**arguments))  # the task copies the context, so it knows its node
                await asyncio.sleep(0)
                results.append(task.result() if task.done() else task)
            else:
                results.append(call(**arguments))
    return results


async def _resolved(results: list) -> list:
    """The results with every task awaited."""
    return [await result if isinstance(result, asyncio.Future) else result for result in results]


class _Answer(NamedTuple):
    """What one call of a node gave: its outputs, what the editor shows, the nodes that it adds to the graph."""

    values: Any
    ui: dict | None
    expand: dict[str, dict] | None


def _unpacked(returned: Any, class_def: Any) -> _Answer:
    """Whatever a node returned; outputs that are links are those of the nodes that it adds."""
    ui, expand = None, None
    if isinstance(returned, _NodeOutputInternal):
        ui, expand, values = returned.ui, returned.expand, returned.result  # type: ignore[attr-defined]
        if returned.block_execution is not None:  # type: ignore[attr-defined]
            values = ExecutionBlocker(returned.block_execution)  # type: ignore[attr-defined]
        ui = ui.as_dict() if ui is not None and not isinstance(ui, dict) else ui
    elif isinstance(returned, dict):
        ui, expand, values = returned.get("ui"), returned.get("expand"), returned.get("result")
    elif returned is None:
        raise TypeError(
            f'{class_def.__name__} returned None; a node returns a tuple of its outputs, or a dict with "result" or'
            ' "ui"'
        )
    else:
        values = returned
    if values is not None and not isinstance(values, ExecutionBlocker) and not hasattr(values, "__len__"):
        raise TypeError(
            f"{class_def.__name__} returned one {type(values).__name__}; a node returns a tuple of its outputs, which"
            " for one output has a comma: (value,)"
        )
    if expand is not None and values is None:
        raise TypeError(f'{class_def.__name__} returned "expand" without "result", which says what its outputs are')
    if isinstance(values, ExecutionBlocker):
        values = (values,) * len(class_def.RETURN_TYPES)
    return _Answer(values, ui, expand)


def _merged(calls: list[tuple], class_def: Any) -> list[list]:
    """For each output the values of all calls; an output that is a list itself gives its entries."""
    if not calls:
        return []
    is_list = getattr(class_def, "OUTPUT_IS_LIST", None) or [False] * len(calls[0])
    merged: list[list] = []
    for index, flag in zip(range(len(calls[0])), is_list, strict=False):
        column = [call[index] for call in calls]
        merged.append(
            [
                entry
                for value in column
                for entry in (value if flag and not isinstance(value, ExecutionBlocker) else [value])
            ]
        )
    return merged


def _shown_by(answers: Iterable[_Answer]) -> dict:
    """What the editor shows of all calls together."""
    shown = [answer.ui for answer in answers if answer.ui is not None]
    return {key: [value for one in shown for value in one[key]] for key in shown[0]} if shown else {}


# --- what makes two executions the same -------------------------------------------------------------------------------


class _Signatures:
    """A number for every node of a workflow: equal exactly when class, constants, fingerprints and everything upstream
    are equal.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple, int] = {}
        self._fresh = itertools.count()

    async def add(
        self, prompt_id: str, added: Mapping[str, dict], signed: dict[str, int], input_types: _InputTypes
    ) -> None:
        """Enter the numbers of added nodes into `signed`, which has those of the nodes that are there already; a link
        that closes a cycle is like no other.
        """
        for node_id in added:
            signed.pop(node_id, None)
        for node_id in _ancestors_first(added):
            node = added[node_id]
            own = await self._own_part(prompt_id, node_id, node, input_types)
            key = (*own, *self._input_part(node["inputs"], signed))
            if key not in self._numbers:
                self._numbers[key] = next(self._fresh)
            signed[node_id] = self._numbers[key]

    def keep(self, numbers: Iterable[int]) -> None:
        """Forget all numbers but these and those of the nodes upstream."""
        keys = {number: key for key, number in self._numbers.items()}
        kept: dict[tuple, int] = {}
        pending = list(numbers)
        while pending:
            number = pending.pop()
            key = keys.pop(number, None)
            if key is not None:
                kept[key] = number
                pending += _upstream_numbers(key)
        self._numbers = kept

    async def _own_part(self, prompt_id: str, node_id: str, node: dict, input_types: _InputTypes) -> tuple:
        class_def: Any = nodes.NODE_CLASS_MAPPINGS[node["class_type"]]
        hidden = input_types[class_def].get("hidden", {}).values()
        asks_for_id = any(kind == "UNIQUE_ID" or kind == ("UNIQUE_ID",) for kind in hidden)
        of_this_node = asks_for_id or getattr(class_def, "NOT_IDEMPOTENT", False)
        changed = self._frozen(await _fingerprint(prompt_id, node_id, node, class_def, input_types))
        return (node["class_type"], changed, node_id if of_this_node else None)  # OWN_PARTS

    def _input_part(self, inputs: Mapping[str, Any], signed: Mapping[str, int]) -> Iterable[tuple]:
        for name in sorted(inputs):
            value = inputs[name]
            if is_link(value):
                yield name, "link", signed.get(value[0], -1 - next(self._fresh)), value[1]
            else:
                yield name, "value", self._frozen(value)

    def _frozen(self, value: Any) -> Any:
        """A constant as something hashable, type included; NaN and unknown objects never equal anything."""
        if isinstance(value, Mapping):
            return ("map", *sorted((str(key), self._frozen(entry)) for key, entry in value.items()))
        if isinstance(value, (list, tuple)):
            return ("list", *(self._frozen(entry) for entry in value))
        if value is None or (isinstance(value, (str, int, float, bool, bytes)) and value == value):
            return (type(value).__name__, value)
        return ("unlike anything", next(self._fresh))


OWN_PARTS = 3  # of a signature: class, fingerprint and id; then one part for each input


def _upstream_numbers(key: tuple) -> list[int]:
    """The numbers of the nodes that a signature links to."""
    return [part[2] for part in key[OWN_PARTS:] if part[1] == "link"]


def _ancestors_first(prompt: Mapping[str, dict]) -> list[str]:
    """The nodes, each after all that it links to; links to nowhere and links that close a cycle are passed over."""
    return sorted(prompt, key=_Depths(prompt).__getitem__)


class _Depths(dict):
    """For each node the length of the longest path that leads to it; a link that closes a cycle is not followed."""

    def __init__(self, prompt: Mapping[str, dict]):
        super().__init__()
        self._prompt = prompt

    def _sources(self, node_id: str) -> list[str]:
        inputs = self._prompt[node_id]["inputs"].values()
        return [value[0] for value in inputs if is_link(value) and value[0] in self._prompt]

    def __missing__(self, node_id: str) -> int:
        sources = self._sources(node_id)
        stack, open_nodes = [(node_id, sources, iter(sources))], {node_id}
        while stack:
            current, sources, left = stack[-1]
            waiting = next((source for source in left if source not in self and source not in open_nodes), None)
            if waiting is None:
                self[current] = 1 + max((self.get(source, -1) for source in sources), default=-1)
                open_nodes.discard(current)
                stack.pop()
                continue
            sources = self._sources(waiting)
            stack.append((waiting, sources, iter(sources)))
            open_nodes.add(waiting)
        return self[node_id]


async def _fingerprint(prompt_id: str, node_id: str, node: dict, class_def: Any, input_types: _InputTypes) -> Any:
    """What fingerprint_inputs or IS_CHANGED says, given the constants among the inputs; False without one."""
    method = _optional_method(class_def, "fingerprint_inputs", "IS_CHANGED")
    if method is None:
        return False
    values, _, v3_data = get_input_data(node["inputs"], class_def, node_id, input_types=input_types)
    try:
        return await _resolved(await _call_over_lists(prompt_id, node_id, class_def, values, method, v3_data))
    except Exception as error:  # noqa: BLE001  (a node's own code: any failure means that nothing may be reused)
        logging.warning("%s %s: %s failed, so its result is not reused: %s", node["class_type"], node_id, method, error)
        return float("nan")


# --- a workflow -------------------------------------------------------------------------------------------------------


class _Interrupted(NamedTuple):
    """How a run ended early: the node, and what to report."""

    node_id: str
    error: BaseException
    inputs: dict


class _Run:
    """One execution of one workflow: which nodes wait for which, what runs, what is done."""

    def __init__(
        self,
        executor: PromptExecutor,
        prompt_id: str,
        prompt: dict,
        extra_data: dict,
        signatures: dict[str, int],
        input_types: _InputTypes,
    ):
        self.executor, self.prompt_id, self.extra_data, self.signatures = executor, prompt_id, extra_data, signatures
        self.prompt, self.input_types = DynamicPrompt(prompt), input_types
        self.waiting = WaitingNodes()
        self.sources: dict[str, dict[str, CacheEntry | None]] = {}  # for each node that waits the results it has so far
        self.expansions: dict[str, list[_Answer]] = {}  # of nodes that wait for the nodes that they added
        self.running: dict[asyncio.Future, str] = {}
        self.ended: list[asyncio.Future] = []  # of those that run: the ones with a result
        self.woken = asyncio.Event()
        self.arguments: dict[str, dict] = {}
        self.executed: list[str] = []

    # what is there
    def entry(self, node_id: str) -> CacheEntry | None:
        """A node's result, if it is cached."""
        return self.executor.cache.get(self.signatures.get(node_id, -1))

    def _class(self, node_id: str) -> Any:
        return nodes.NODE_CLASS_MAPPINGS[self.prompt.get_node(node_id)["class_type"]]

    # what is needed
    def demand(self, node_id: str) -> None:
        """Have a node executed, and before it everything that it is linked to (but for lazy inputs) and that has no
        result.
        """
        pending = [node_id]
        while pending:
            current = pending.pop()
            if current in self.waiting:
                continue
            self.sources[current] = {source: self.entry(source) for source in self._eager_sources(current)}
            missing = [source for source, entry in self.sources[current].items() if entry is None]
            self.waiting.add(current, self._is_output(current) or self._is_async(current), missing)
            pending += missing

    def _eager_sources(self, node_id: str) -> list[str]:
        class_def, inputs = self._class(node_id), self.prompt.get_node(node_id)["inputs"]
        spec = self.input_types[class_def]
        links = {name: value[0] for name, value in inputs.items() if is_link(value)}
        return [
            source for name, source in links.items() if not (get_input_info(class_def, name, spec)[2] or {}).get("lazy")
        ]

    def _demand_inputs(self, node_id: str, names: Iterable[str]) -> None:
        """Have the lazy inputs that a node asked for executed before it is tried again."""
        inputs = self.prompt.get_node(node_id)["inputs"]
        for name in names:
            if name not in inputs:
                raise NodeInputError(
                    f"Node {node_id} says it needs input {name}, but there is no input to that node at all"
                )
            if not is_link(inputs[name]):
                raise NodeInputError(f"Node {node_id} says it needs input {name}, but that value is a constant")
            self._wait_for(node_id, inputs[name][0])

    def _wait_for(self, node_id: str, source: str) -> None:
        """Have a node wait for the result of another, unless that is there."""
        sources = self.sources[node_id]
        if sources.get(source) is not None:
            return
        sources[source] = self.entry(source)
        if sources[source] is None:
            self.demand(source)
            self.waiting.wait_for(node_id, source)

    # going through it
    async def go(self) -> _Interrupted | None:
        """Execute until nothing waits; returns how it failed, if it did."""
        while self.waiting:
            node_id = self.waiting.take()
            if node_id is not None:
                failure = await self._step(node_id)
            elif self.running:
                await self.woken.wait()
                failure = await self._collect()
            else:
                failure = self._cycle()
            if failure is not None:
                await self._cancel()
                return failure
        return None

    async def _cancel(self) -> None:
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        self.running.clear()

    def _is_output(self, node_id: str) -> bool:
        return bool(getattr(self._class(node_id), "OUTPUT_NODE", False))

    def _is_async(self, node_id: str) -> bool:
        class_def = self._class(node_id)
        return inspect.iscoroutinefunction(getattr(class_def, class_def.FUNCTION))

    def _cycle(self) -> _Interrupted:
        """Nodes that wait for each other; the node that added one of them is to blame, as validation finds all cycles
        that a workflow has from the start.
        """
        cycle = self.waiting.cycle()
        shown = " -> ".join(f"{node_id} ({self.prompt.get_node(node_id)['class_type']})" for node_id in cycle)
        added = [node_id for node_id in cycle if self.prompt.get_parent_node_id(node_id) is not None]
        blamed = self._displayed((added or cycle)[0])
        return _Interrupted(blamed, DependencyCycleError(f"Dependency cycle detected: {shown} -> {cycle[0]}"), {})

    def _displayed(self, node_id: str) -> str:
        """The workflow's node that stands for a node: the one shown, if the workflow has it."""
        shown = self.prompt.get_display_node_id(node_id)
        return shown if shown in self.prompt.original_prompt else self.prompt.get_real_node_id(node_id)

    async def _step(self, node_id: str) -> _Interrupted | None:
        """Execute one node that waits for nothing, unless its result is there."""
        entry = self.entry(node_id)
        if entry is not None:
            self._done(node_id, entry, was_cached=True)
            return None
        if node_id in self.expansions:
            return await self._guarded(node_id, self._take_expansion(node_id))
        return await self._guarded(node_id, self._execute(node_id))

    async def _guarded(self, node_id: str, work: Awaitable[None]) -> _Interrupted | None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  (a node's own code: whatever it raises is reported, with the node's name)
            return _Interrupted(node_id, error, self.arguments.get(node_id, {}))
        return None

    def _outputs_for(self, node_id: str) -> Callable[[str], list[list] | None]:
        """What the nodes that a node waited for have computed."""

        def outputs(source: str) -> list[list] | None:
            entry = self.sources[node_id].get(source)
            return None if entry is None else entry.outputs

        return outputs

    async def _execute(self, node_id: str) -> None:
        node, class_def, server = self.prompt.get_node(node_id), self._class(node_id), self.executor.server
        get_progress_state().start_progress(node_id)
        values, missing, v3_data = get_input_data(
            node["inputs"],
            class_def,
            node_id,
            self._outputs_for(node_id),
            self.prompt,
            self.extra_data,
            self.input_types,
        )
        self.arguments[node_id] = values
        display_id = self.prompt.get_display_node_id(node_id)
        server.last_node_id = display_id
        self._send("executing", {"node": node_id, "display_node": display_id, "prompt_id": self.prompt_id})
        obj = self._object(node_id, node["class_type"], class_def)
        lazy = _optional_method(obj, "check_lazy_status", "check_lazy_status")
        if lazy is not None:
            named = {**v3_data, "create_dynamic_tuple": True}  # it has to know how the workflow names an input
            answers = await _resolved(
                await _call_over_lists(self.prompt_id, node_id, obj, values, lazy, named, interruptible=True)
            )
            asked = {name for answer in answers if isinstance(answer, list) for name in answer if isinstance(name, str)}
            needed = sorted(name for name in asked if name not in values or name in missing)
            if needed:
                self._demand_inputs(node_id, needed)
                self.waiting.give_back(node_id)
                return
        results = await _call_over_lists(
            self.prompt_id,
            node_id,
            obj,
            values,
            class_def.FUNCTION,
            v3_data,
            interruptible=True,
            on_block=self._on_block(node_id),
        )
        if any(isinstance(result, asyncio.Future) for result in results):
            task = asyncio.ensure_future(_resolved(results))
            self.running[task] = node_id
            task.add_done_callback(self._wake)
        else:
            await self._finish(node_id, results)

    def _object(self, node_id: str, class_type: str, class_def: Any) -> Any:
        """The node's instance, which lives as long as the node is in the workflow if the cache keeps anything."""
        objects = self.executor.objects
        if not self.executor.cache.keeps_objects:
            return class_def()
        if (node_id, class_type) not in objects:
            objects[node_id, class_type] = class_def()
        return objects[node_id, class_type]

    def _wake(self, task: asyncio.Future) -> None:
        self.ended.append(task)
        self.woken.set()

    async def _collect(self) -> _Interrupted | None:
        """Take the results of async nodes that have ended."""

        async def take(node_id: str, task: asyncio.Future) -> None:
            await self._finish(node_id, task.result())

        failure, ended = None, self.ended
        self.ended = []
        self.woken.clear()
        for task in ended:
            node_id = self.running.pop(task)
            failure = await self._guarded(node_id, take(node_id, task)) or failure
        return failure

    async def _finish(self, node_id: str, results: list) -> None:
        """Take what a node returned: its outputs, or the nodes whose outputs become its own."""
        class_def = self._class(node_id)
        answers = [_unpacked(result, class_def) for result in results]
        ui = _shown_by(answers)
        if ui:
            self._show(node_id, ui)
        if any(answer.expand is not None for answer in answers):
            await self._expand(node_id, answers)
            return
        self._keep(node_id, _merged([answer.values for answer in answers if answer.values is not None], class_def), ui)

    # nodes that add nodes
    async def _expand(self, node_id: str, answers: list[_Answer]) -> None:
        """Add the nodes that a node returned to the graph, and have it wait for those that give its outputs."""
        added: dict[str, dict] = {}
        for answer in answers:
            added.update(answer.expand or {})
        self._enter(node_id, added)
        await self.executor.signatures.add(self.prompt_id, added, self.signatures, self.input_types)
        self.executor.note_expansion(self._key(node_id), {self._key(key): self.signatures[key] for key in added})
        self.executor.cache.expanded()
        for key in added:
            if self._is_output(key):
                self.demand(key)
        self.expansions[node_id] = answers
        for answer in answers:
            links = [value for value in answer.values or () if answer.expand is not None and is_link(value)]
            for source, _ in links:
                self._wait_for(node_id, source)
        self.arguments.pop(node_id, None)
        self.waiting.give_back(node_id)

    def _enter(self, node_id: str, added: dict[str, dict]) -> None:
        """Add nodes to the graph; the editor shows the node that added them, or the one that they name."""
        for key, node in added.items():
            if node["class_type"] not in nodes.NODE_CLASS_MAPPINGS:
                own = self.prompt.get_node(node_id)["class_type"]
                raise NodeNotFoundError(f"{own} added a node of class {node['class_type']}, which is not installed")
            self.prompt.add_ephemeral_node(key, node, node_id, node.get("override_display_id", node_id))

    def _key(self, node_id: str) -> tuple[str, str]:
        return node_id, self.prompt.get_node(node_id)["class_type"]

    async def _take_expansion(self, node_id: str) -> None:
        """Make the outputs of the nodes that a node added its own; as in ComfyUI, an output with several values fills
        as many places.
        """
        outputs = self._outputs_for(node_id)
        calls = []
        for answer in self.expansions.pop(node_id):
            if answer.expand is None:
                calls += [] if answer.values is None else [answer.values]
                continue
            values: list[Any] = []
            for value in answer.values:
                values += self._linked(outputs, value) if is_link(value) else [value]
            calls.append(tuple(values))
        shown = self.executor.shown.get(node_id, {})
        self._keep(node_id, _merged(calls, self._class(node_id)), shown)

    def _linked(self, outputs: Callable[[str], list[list] | None], link: list) -> list:
        """The values at the output of a node that was added."""
        source, index = link
        computed = outputs(source) or []
        if index >= len(computed):
            raise NodeInputError(f"an output is linked to output {index} of node {source}, which it does not have")
        return computed[int(index)]

    # what came of it
    def _keep(self, node_id: str, outputs: list[list], ui: dict) -> None:
        entry = CacheEntry(outputs, ui)
        self.executor.cache.put(self.signatures[node_id], entry)
        self._done(node_id, entry)
        self.executor.cache.node_done()

    def _done(self, node_id: str, entry: CacheEntry, was_cached: bool = False) -> None:
        for waiter in self.waiting.done(node_id):
            self.sources[waiter][node_id] = entry
        del self.sources[node_id]
        self.arguments.pop(node_id, None)
        if was_cached:
            self._show(node_id, entry.ui)
        else:
            self.executed.append(node_id)
        get_progress_state().finish_progress(node_id)

    def _show(self, node_id: str, ui: dict) -> None:
        """Send what the editor shows on a node."""
        if ui:
            self.executor.shown[node_id] = ui
        display_id = self.prompt.get_display_node_id(node_id)
        data = {"node": node_id, "display_node": display_id, "output": ui or None, "prompt_id": self.prompt_id}
        self._send("executed", data)

    def show_cached(self) -> None:
        """Send again what the editor shows of nodes whose results were there, and that no other node needed."""
        for node_id in self.signatures:
            entry = self.entry(node_id)
            if entry is not None and entry.ui and node_id not in self.executor.shown:
                self._show(node_id, entry.ui)

    def where(self, node_id: str) -> dict[str, str | None]:
        """Where a node stands in the graph, as the history tells it."""
        return {
            "node_id": node_id,
            "display_node": self.prompt.get_display_node_id(node_id),
            "parent_node": self.prompt.get_parent_node_id(node_id),
            "real_node_id": self.prompt.get_real_node_id(node_id),
        }

    def _on_block(self, node_id: str) -> Callable[[ExecutionBlocker], ExecutionBlocker]:
        """Report a blocker's message once, where it stops something; from there on it blocks silently."""

        def report(blocker: ExecutionBlocker) -> ExecutionBlocker:
            if blocker.message is None:
                return blocker
            self._send(
                "execution_error",
                {
                    "prompt_id": self.prompt_id,
                    "node_id": node_id,
                    "node_type": self.prompt.get_node(node_id)["class_type"],
                    "executed": list(self.executed),
                    "exception_message": f"Execution Blocked: {blocker.message}",
                    "exception_type": "ExecutionBlocked",
                    "traceback": [],
                    "current_inputs": [],
                    "current_outputs": [],
                },
            )
            return ExecutionBlocker(None)

        return report

    def _send(self, event: str, data: dict) -> None:
        if self.executor.server.client_id is not None:
            self.executor.server.send_sync(event, data, self.executor.server.client_id)


class PromptExecutor:
    """Executes workflows one after the other; keeps the results of the latest for the next.

    `success`, `status_messages` and `history_result` speak of the latest run."""

    def __init__(self, server: Any, cache_type: CacheType | bool = False, cache_args: dict | None = None):
        self.server = server
        self.cache_type = cache_type
        self.cache_args = cache_args or {}
        self.reset()

    def reset(self) -> None:
        """Forget every result."""
        self.cache = _cache(self.cache_type, self.cache_args)
        self.objects: dict[tuple[str, str], Any] = {}
        self.shown: dict[str, dict] = {}
        self.status_messages: list[tuple[str, dict]] = []
        self.history_result: dict[str, dict] = {"outputs": {}, "meta": {}}
        self.success = True
        self.signatures = _Signatures()
        self._expansions: dict[tuple[str, str], dict[tuple[str, str], int]] = {}

    def add_message(self, event: str, data: dict, broadcast: bool) -> None:
        """Note an event of the run and send it, to the client that queued it or to all."""
        data = {**data, "timestamp": int(time.time() * 1000)}
        self.status_messages.append((event, data))
        if self.server.client_id is not None or broadcast:
            self.server.send_sync(event, data, self.server.client_id)

    def execute(self, prompt: dict, prompt_id: str, extra_data: dict = {}, execute_outputs: list[str] = []) -> None:  # noqa: B006
        """Execute a validated workflow from outside of an event loop."""
        asyncio.run(self.execute_async(prompt, prompt_id, extra_data, execute_outputs))

    async def execute_async(
        self,
        prompt: dict,
        prompt_id: str,
        extra_data: dict = {},  # noqa: B006
        execute_outputs: list[str] = [],  # noqa: B006
    ) -> None:
        """Execute a validated workflow as far as `execute_outputs` need it."""
        latent_preview.set_preview_method(extra_data.get("preview_method"))
        nodes.interrupt_processing(False)
        self.server.client_id = extra_data.get("client_id")
        self.server.last_prompt_id = prompt_id
        self.status_messages, self.shown, self.success = [], {}, True
        self.add_message("execution_start", {"prompt_id": prompt_id}, broadcast=False)
        with torch.inference_mode():
            input_types = _InputTypes()
            signatures: dict[str, int] = {}
            await self.signatures.add(prompt_id, prompt, signatures, input_types)
            run = _Run(self, prompt_id, prompt, extra_data, signatures, input_types)
            reset_progress_state(prompt_id, run.prompt)
            add_progress_handler(WebUIProgressHandler(self.server))
            self._drop_unused(prompt, signatures)
            cached = [node_id for node_id in prompt if run.entry(node_id) is not None]
            comfy.model_management.cleanup_models_gc()
            self.add_message("execution_cached", {"nodes": cached, "prompt_id": prompt_id}, broadcast=False)
            for node_id in execute_outputs:
                run.demand(node_id)
            failure = await run.go()
            if failure is None:
                run.show_cached()
        if failure is None:
            self.add_message("execution_success", {"prompt_id": prompt_id}, broadcast=False)
        else:
            self.success = False
            self._report(run, failure)
        self.history_result = {
            "outputs": dict(self.shown),
            "meta": {node_id: run.where(node_id) for node_id in self.shown},
        }
        self.server.last_node_id = None

    def note_expansion(self, node: tuple[str, str], added: dict[tuple[str, str], int]) -> None:
        """Remember which nodes (id, class) a node added, with their numbers: their results are kept with its own."""
        self._expansions[node] = added

    def _drop_unused(self, prompt: dict, signatures: dict[str, int]) -> None:
        """Let go of results and node objects that this workflow has no use for."""
        present = {(node_id, node["class_type"]): signatures[node_id] for node_id, node in prompt.items()}
        numbers, pending = set(signatures.values()), list(present)
        while pending:
            added = self._expansions.get(pending.pop(), {})
            fresh = [key for key in added if key not in present]
            numbers.update(added.values())
            present.update(added)
            pending += fresh
        self._expansions = {key: added for key, added in self._expansions.items() if key in present}
        self.cache.begin(numbers)
        self.signatures.keep({*numbers, *self.cache.entries})
        self.objects = {key: obj for key, obj in self.objects.items() if key in present}

    def _report(self, run: _Run, failure: _Interrupted) -> None:
        """Send what went wrong: an interruption, or the node's error with its inputs."""
        node_id, error = run.prompt.get_real_node_id(failure.node_id), failure.error
        data: dict[str, Any] = {
            "prompt_id": run.prompt_id,
            "node_id": node_id,
            "node_type": run.prompt.get_node(node_id)["class_type"],
            "executed": list(run.executed),
        }
        if isinstance(error, comfy.model_management.InterruptProcessingException):
            logging.info("Processing interrupted")
            self.add_message("execution_interrupted", data, broadcast=True)
            return
        logging.error("%s %s: %s", data["node_type"], node_id, error, exc_info=error)
        tip = ""
        if isinstance(error, torch.OutOfMemoryError):
            tip = "\nThe device ran out of memory; a smaller batch or picture needs less."
            comfy.model_management.unload_all_models()
        data.update(
            exception_message=f"{error}\n{tip}" if tip else str(error),
            exception_type=full_type_name(type(error)),
            traceback=traceback.format_tb(error.__traceback__),
            current_outputs=[key for key in run.signatures if run.entry(key) is not None],
            current_inputs={name: [_shown_value(value) for value in values] for name, values in failure.inputs.items()},
        )
        self.add_message("execution_error", data, broadcast=False)


def _shown_value(value: Any) -> Any:
    """A value as it can be sent to a browser."""
    return value if value is None or isinstance(value, (int, float, bool, str)) else str(value)


def full_type_name(klass: type) -> str:
    """A class's name with its module, unless it is a builtin."""
    return klass.__qualname__ if klass.__module__ == "builtins" else f"{klass.__module__}.{klass.__qualname__}"


# --- validation -------------------------------------------------------------------------------------------------------


def _problem(kind: str, message: str, details: str, **extra: Any) -> dict[str, Any]:
    return {"type": kind, "message": message, "details": details, "extra_info": extra}


def _converted(value: Any, input_type: Any) -> Any:
    """A constant as the type of its widget; a list is wrapped as {"__value__": […]} because a bare one is a link."""
    if isinstance(value, dict) and "__value__" in value:
        value = value["__value__"]
    kind = (
        {"INT": int, "FLOAT": float, "STRING": str, "BOOLEAN": bool}.get(input_type)
        if isinstance(input_type, str)
        else None
    )
    return value if kind is None else kind(value)


def _range_problem(name: str, value: Any, input_type: Any, options: dict) -> dict | None:
    """What is wrong with a constant's value by its widget's limits or choices."""
    extra = {"input_name": name, "input_config": (input_type, options), "received_value": value}
    if "min" in options and value < options["min"]:
        return _problem("value_smaller_than_min", f"Value {value} smaller than min of {options['min']}", name, **extra)
    if "max" in options and value > options["max"]:
        return _problem("value_bigger_than_max", f"Value {value} bigger than max of {options['max']}", name, **extra)
    is_combo = isinstance(input_type, list) or input_type == "COMBO"  # packs override __ne__, not __eq__
    if not is_combo:
        return None
    choices = input_type if isinstance(input_type, list) else options.get("options") or []
    chosen = value if options.get("multiselect") and isinstance(value, list) else [value]
    if all(choice in choices for choice in chosen):
        return None
    listed = str(choices) if len(choices) <= 20 else f"(list of length {len(choices)})"
    if len(choices) > 20:
        extra["input_config"] = None
    strange = ", ".join(repr(choice) for choice in chosen if choice not in choices)
    return _problem("value_not_in_list", "Value not in list", f"{name}: {strange} not in {listed}", **extra)


class _Validator:
    """Finds everything that is wrong with a workflow's nodes, each once."""

    def __init__(self, prompt_id: str, prompt: dict[str, dict]):
        self.prompt_id, self.prompt = prompt_id, prompt
        self.problems: dict[str, list[dict]] = {}
        self.cyclic: dict[str, list[dict]] = {}
        self.input_types = _InputTypes()
        self._given: set[str] = set()  # the nodes that `upstream` gave
        self._searched: set[str] = set()  # the nodes that `cycles` has been through

    def known_class(self, node_id: str) -> Any:
        return nodes.NODE_CLASS_MAPPINGS.get(self.prompt[node_id].get("class_type", ""))

    def links(self, node_id: str) -> list[str]:
        """The nodes that a node links to, as far as they are there."""
        inputs = self.prompt[node_id].get("inputs", {}).values()
        return [value[0] for value in inputs if is_link(value) and value[0] in self.prompt]

    async def visit(self, node_id: str, is_start: bool) -> None:
        """Find the problems of one node itself; what its own validation raises is one of them, under a name that tells
        an output of the workflow from a node that it needs.
        """
        class_def = self.known_class(node_id)
        if node_id in self.problems or class_def is None:
            return
        try:
            self.problems[node_id] = await self._of_node(node_id, class_def)
        except Exception as error:  # noqa: BLE001  (a node's own code: whatever it raises is reported as the node's problem)
            extra = {
                "exception_message": str(error),
                "exception_type": full_type_name(type(error)),
                "traceback": traceback.format_tb(error.__traceback__),
            }
            kind, message = "exception_during_inner_validation", "Exception when validating inner node"
            if is_start:
                kind, message = "exception_during_validation", "Exception when validating node"
            self.problems[node_id] = [_problem(kind, message, str(error), **extra)]

    def found(self) -> dict[str, list[dict]]:
        """All problems, by node in the workflow's order."""
        both = {node_id: self.problems.get(node_id, []) + self.cyclic.get(node_id, []) for node_id in self.prompt}
        return {node_id: problems for node_id, problems in both.items() if problems}

    async def _of_node(self, node_id: str, class_def: Any) -> list[dict]:
        inputs = self.prompt[node_id]["inputs"]
        spec, gathering = self.input_types.sent(class_def, inputs)
        method = _optional_method(class_def, "validate_inputs", "VALIDATE_INPUTS")
        takes: set[str] = set()
        takes_all = False
        if method is not None:
            signature = inspect.getfullargspec(getattr(class_def, method))
            takes, takes_all = {*signature.args, *signature.kwonlyargs}, signature.varkw is not None
        problems: list[dict] = []
        received: dict[str, Any] = {}
        for name in {**spec.get("required", {}), **spec.get("optional", {})}:
            input_type, category, options = get_input_info(class_def, name, spec)
            info, own_check = (input_type, category, options or {}), takes_all or name in takes
            problem = self._of_input(node_id, name, info, received, "input_types" in takes, own_check)
            if problem is not None and gathering and problem["type"] == "required_input_missing":
                problem["details"] = name.split(".")[-1]  # as ComfyUI says it
            problems += [] if problem is None else [problem]
        if method is not None and (takes or takes_all):
            broken = {problem["extra_info"]["input_name"] for problem in problems}
            problems += await self._by_the_node(
                node_id, class_def, method, inputs, received, (takes, takes_all), broken
            )
        return problems

    def _of_input(
        self,
        node_id: str,
        name: str,
        info: tuple,
        received: dict[str, Any],
        any_type: bool,
        own_check: bool,
    ) -> dict | None:
        """What is wrong with one input; converts a constant in place, notes the type that a link brings."""
        input_type, category, options = info
        inputs = self.prompt[node_id]["inputs"]
        extra: dict[str, Any] = {"input_name": name, "input_config": (input_type, options)}
        if name not in inputs:
            missing = category == "required"
            return (
                _problem("required_input_missing", "Required input is missing", name, input_name=name)
                if missing
                else None
            )
        value = inputs[name]
        if isinstance(value, list):
            return self._of_link(name, value, input_type, extra, received, any_type)
        try:
            value = inputs[name] = _converted(value, input_type)
        except (TypeError, ValueError, OverflowError) as error:
            message = f"Failed to convert an input value to a {input_type} value"
            details = f"{name}, {value}, {error}"
            return _problem(
                "invalid_input_type", message, details, **extra, received_value=value, exception_message=str(error)
            )
        return None if own_check else _range_problem(name, value, input_type, options)

    def _of_link(
        self, name: str, value: list, input_type: Any, extra: dict, received: dict[str, Any], any_type: bool
    ) -> dict | None:
        if not is_link(value):
            message = "Bad linked input, must be a length-2 list of [node_id, slot_index]"
            return _problem("bad_linked_input", message, name, **extra, received_value=value)
        source, index = value
        if source not in self.prompt:
            message = f"Bad linked input, there is no node {source}"
            return _problem("bad_linked_input", message, name, **extra, received_value=value)
        source_class = self.known_class(source)
        if source_class is None:
            return None  # reported at the source
        types = source_class.RETURN_TYPES
        if not 0 <= index < len(types):
            message = (
                f"Bad linked input, {self.prompt[source]['class_type']} {source} has no output {index}, it has"
                f" {len(types)}"
            )
            return _problem("bad_linked_input", message, name, **extra, received_value=value)
        received[name] = types[int(index)]
        if any_type or validate_node_input(received[name], input_type):
            return None
        details = f"{name}, received_type({received[name]}) mismatch input_type({input_type})"
        message = "Return type mismatch between linked nodes"
        return _problem(
            "return_type_mismatch", message, details, **extra, received_type=received[name], linked_node=value
        )

    async def _by_the_node(
        self,
        node_id: str,
        class_def: Any,
        method: str,
        inputs: dict,
        received: dict[str, Any],
        accepts: tuple[set[str], bool],
        broken: set[str],
    ) -> list[dict]:
        """What the node's own validation says, input by input that it takes; not asked when one of those is broken
        already.
        """
        takes, takes_all = accepts
        values, _, v3_data = get_input_data(inputs, class_def, node_id, input_types=self.input_types)
        values = {name: value for name, value in values.items() if name in takes or takes_all}
        if broken & (set(values) if takes_all else takes):
            return []
        if "input_types" in takes:
            values["input_types"] = [received]
        results = await _resolved(await _call_over_lists(self.prompt_id, node_id, class_def, values, method, v3_data))
        answers = [answer for answer in results if answer is not True and not isinstance(answer, ExecutionBlocker)]
        return [
            _problem(
                "custom_validation_failed",
                "Custom validation failed for node",
                name if answer is False else f"{name} - {answer}",
                input_name=name,
            )
            for name in values
            for answer in answers
        ]

    def cycles(self, start: str) -> None:
        """Note a problem at every node of each cycle that is upstream of `start`: one cycle for each link that closes
        one, going through each node once, whatever the start.
        """
        path: list[str] = []
        positions: dict[str, int] = {}  # of the nodes on the path
        stack: list[tuple[str, bool]] = [(start, False)]
        while stack:
            node_id, leaving = stack.pop()
            if leaving:
                del positions[path.pop()]
                self._searched.add(node_id)
            elif node_id in positions:
                self._note_cycle(path[positions[node_id] :])
            elif node_id not in self._searched:
                positions[node_id] = len(path)
                path.append(node_id)
                stack.append((node_id, True))
                stack += [(source, False) for source in dict.fromkeys(self.links(node_id))]

    def _note_cycle(self, cycle: list[str]) -> None:
        shown = " -> ".join(f"{node_id} ({self.prompt[node_id].get('class_type')})" for node_id in [*cycle, cycle[0]])
        for node_id in cycle:
            problem = _problem(
                "dependency_cycle", "Dependency cycle detected", shown, node_id=node_id, cycle_nodes=cycle
            )
            self.cyclic.setdefault(node_id, []).append(problem)

    def upstream(self, start: str) -> list[str]:
        """A node and everything it depends on, from the far end; without what was given for an earlier start."""
        found: dict[str, None] = {}
        stack = [start]
        while stack:
            node_id = stack.pop()
            if node_id not in self._given:
                self._given.add(node_id)
                found[node_id] = None
                stack += self.links(node_id)
        return list(found)[::-1]

    def dependents(self, outputs: Sequence[str]) -> dict[str, list[str]]:
        """For each node with problems the outputs that depend on it."""
        behind = self._outputs_behind(outputs)
        return {
            node_id: [output for number, output in enumerate(outputs) if behind[node_id] >> number & 1]
            for node_id in self.found()
        }

    def _outputs_behind(self, outputs: Sequence[str]) -> dict[str, int]:
        """For each node one bit an output that depends on it; one pass says it all unless there are cycles."""
        behind = dict.fromkeys(self.prompt, 0)
        behind.update((output, 1 << number) for number, output in enumerate(outputs))
        targets_first = _ancestors_first(self.prompt)[::-1]
        changed = True
        while changed:
            changed = False
            for node_id in targets_first:
                for source in self.links(node_id):
                    if behind[node_id] & ~behind[source]:
                        behind[source] |= behind[node_id]
                        changed = True
        return behind


def _unknown_nodes(prompt: dict[str, dict]) -> list[dict]:
    """A problem for each node without a class or of a class that is not there."""
    problems = []
    for node_id, node in prompt.items():
        meta = node.get("_meta")
        kind, title = node.get("class_type"), meta.get("title") if isinstance(meta, dict) else None
        if kind in nodes.NODE_CLASS_MAPPINGS:
            continue
        if kind is None:
            message = (
                f"Node '{title or f'ID #{node_id}'}' has no class_type. The workflow may be corrupted or a custom node"
                " is missing."
            )
        else:
            message = f"Node '{title or kind}' not found. The custom node may not be installed."
        extra = {"node_id": node_id, "class_type": kind, "node_title": title}
        problems.append(_problem("missing_node_type", message, f"Node ID '#{node_id}'", **extra))
    return problems


async def validate_prompt(
    prompt_id: str,
    prompt: dict[str, dict],
    partial_execution_list: list[str] | None,
) -> tuple[bool, dict | None, list[str], dict[str, dict]]:
    """(valid, error, outputs that can run, errors by node); constants are converted to their widgets' types in place.

    Valid means that at least one output can run, as in ComfyUI, except that an unknown node makes the whole invalid.
    The error names every problem; the fourth value has, for each node with problems, {"errors": […],
    "dependent_outputs": […], "class_type": …}.
    """
    unknown = _unknown_nodes(prompt)
    for node in prompt.values():
        node.setdefault("inputs", {})
    validator = _Validator(prompt_id, prompt)
    asked = {node_id for node_id in partial_execution_list or () if isinstance(node_id, str)}
    outputs = [
        node_id
        for node_id in prompt
        if getattr(validator.known_class(node_id), "OUTPUT_NODE", False) is True
        and (partial_execution_list is None or node_id in asked)
    ]
    for problem in unknown:
        validator.problems[problem["extra_info"]["node_id"]] = [problem]
    for start in list(prompt) if unknown or not outputs else outputs:
        validator.cycles(start)
        for node_id in validator.upstream(start):
            await validator.visit(node_id, node_id == start)
    dependents = validator.dependents(outputs) if validator.found() else {}
    node_errors = {
        node_id: {
            "errors": problems,
            "dependent_outputs": dependents[node_id],
            "class_type": prompt[node_id].get("class_type"),
        }
        for node_id, problems in validator.found().items()
    }
    failed = set(itertools.chain.from_iterable(dependents.values()))
    good = [output for output in outputs if output not in failed]
    return _verdict(unknown, outputs, good, node_errors)


def _verdict(
    unknown: list[dict],
    outputs: list[str],
    good: list[str],
    node_errors: dict[str, dict],
) -> tuple[bool, dict | None, list[str], dict[str, dict]]:
    """ComfyUI's answer from what was found."""
    for node_id, found in node_errors.items():
        for problem in found["errors"]:
            logging.error("%s %s: %s: %s", found["class_type"], node_id, problem["message"], problem["details"])
    if unknown:
        error = dict(unknown[0])
        if len(unknown) > 1:
            error["details"] = "; ".join(f"{problem['message']} ({problem['details']})" for problem in unknown)
        return False, error, [], node_errors
    if not outputs:
        return False, _problem("prompt_no_outputs", "Prompt has no outputs", ""), [], node_errors
    if good:
        return True, None, good, node_errors
    details = "\n".join(
        f"{problem['message']}: {problem['details']}" for found in node_errors.values() for problem in found["errors"]
    )
    return (
        False,
        _problem("prompt_outputs_failed_validation", "Prompt outputs failed validation", details),
        [],
        node_errors,
    )


# --- the queue --------------------------------------------------------------------------------------------------------

MAXIMUM_HISTORY_SIZE = 10000


class ExecutionStatus(NamedTuple):
    """How a workflow ended: "success" or "error", whether all of it ran, and the events that were sent."""

    status_str: str
    completed: bool
    messages: list


class PromptQueue:
    """Items are tuples (number, prompt id, prompt, extra data, outputs to execute); the lowest number is next, equal
    ones in order.
    """

    ExecutionStatus: TypeAlias = ExecutionStatus

    def __init__(self, server: Any):
        self.server = server
        self.mutex = threading.RLock()
        self.not_empty = threading.Condition(self.mutex)
        self.task_counter = 0
        self.queue: list[tuple] = []
        self.currently_running: dict[int, tuple] = {}
        self.history: dict[str, dict] = {}
        self.flags: dict[str, Any] = {}

    def put(self, item: tuple) -> None:
        """Add a workflow."""
        with self.mutex:
            bisect.insort(self.queue, item, key=lambda waiting: waiting[0])
            self.server.queue_updated()
            self.not_empty.notify()

    def get(self, timeout: float | None = None) -> tuple[tuple, int] | None:
        """(the next workflow, its number as a task), waiting for one; None when none came within `timeout` seconds or a
        flag was set.
        """
        with self.not_empty:
            while not self.queue:
                if timeout is None or not self.flags:
                    self.not_empty.wait(timeout=timeout)
                if timeout is not None and not self.queue:
                    return None
            item, task = self.queue.pop(0), self.task_counter
            self.task_counter += 1
            self.currently_running[task] = copy.deepcopy(item)
            self.server.queue_updated()
            return item, task

    def task_done(
        self,
        item_id: int,
        history_result: dict,
        status: ExecutionStatus | None,
        process_item: Callable[[tuple], tuple] | None = None,
    ) -> None:
        """Move a running workflow into the history, with what it gave."""
        with self.mutex:
            prompt = self.currently_running.pop(item_id)
            while len(self.history) >= MAXIMUM_HISTORY_SIZE:
                self.history.pop(next(iter(self.history)))
            kept = process_item(prompt) if process_item is not None else prompt
            described = None if status is None else copy.deepcopy(status._asdict())
            self.history[kept[1]] = {"prompt": kept, "outputs": {}, "status": described, **history_result}
            self.server.queue_updated()

    def get_current_queue_volatile(self) -> tuple[list[tuple], list[tuple]]:
        """(running, waiting); the items themselves are shared and must not be changed."""
        with self.mutex:
            return list(self.currently_running.values()), list(self.queue)

    def interrupt_if_running(self, prompt_id: str) -> bool:
        """Interrupt this workflow if it is the one that runs; whether it was."""
        with self.mutex:
            running = any(item[1] == prompt_id for item in self.currently_running.values())
            if running:
                comfy.model_management.interrupt_current_processing(True)
            return running

    def get_tasks_remaining(self) -> int:
        """How many wait or run."""
        with self.mutex:
            return len(self.queue) + len(self.currently_running)

    def wipe_queue(self) -> None:
        """Forget everything that waits."""
        with self.mutex:
            self.queue = []
            self.server.queue_updated()

    def delete_queue_item(self, function: Callable[[tuple], bool]) -> bool:
        """Forget the first waiting workflow for which `function` is true; whether there was one."""
        with self.mutex:
            for index, item in enumerate(self.queue):
                if function(item):
                    del self.queue[index]
                    self.server.queue_updated()
                    return True
        return False

    def get_history(
        self,
        prompt_id: str | None = None,
        max_items: int | None = None,
        offset: int = -1,
        map_function: Callable[[dict], dict] | None = None,
    ) -> dict[str, dict]:
        """What has run, oldest first: all, one by its id, or at most `max_items` from `offset` on (a negative one: the
        latest).
        """
        with self.mutex:
            if prompt_id is not None:
                chosen = [prompt_id] if prompt_id in self.history else []
            else:
                known = list(self.history)
                start = max(0, len(known) - max_items) if offset < 0 and max_items is not None else max(0, offset)
                chosen = known[start:] if max_items is None else known[start : start + max_items]
            entries = {key: self.history[key] for key in chosen}
            if map_function is not None:
                return {key: map_function(entry) for key, entry in entries.items()}
            return copy.deepcopy(entries) if prompt_id is not None else entries

    def wipe_history(self) -> None:
        """Forget everything that has run."""
        with self.mutex:
            self.history = {}

    def delete_history_item(self, id_to_delete: str) -> None:
        """Forget one workflow that has run."""
        with self.mutex:
            self.history.pop(id_to_delete, None)

    def set_flag(self, name: str, data: Any) -> None:
        """Ask something of whoever executes the workflows; it is woken."""
        with self.mutex:
            self.flags[name] = data
            self.not_empty.notify()

    def get_flags(self, reset: bool = True) -> dict[str, Any]:
        """What was asked, and by default forget it."""
        with self.mutex:
            asked = dict(self.flags)
            if reset:
                self.flags = {}
            return asked
