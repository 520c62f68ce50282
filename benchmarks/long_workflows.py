"""What a headless run costs per node: chains, fans and grids of up to 5,000 nodes on the embedded host, and reading
60 MB of workflow JSON in both formats.

python benchmarks/long_workflows.py [--counts 200,400,800,1600,5000] [--megabytes 60] [--rounds 3] [--json FILE]

Each run is `python -m graft_nodes run FILE --embedded` in a fresh process, with nodes that only pass a number on. The
figure is the processor time from reading the file to the end, without opening the host, and the most memory the process
had. Goals: 5,000 nodes in a chain add less than 5 s, 60 MB are read in less than 10 s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GOAL_RUN, GOAL_READ = 5.0, 10.0  # seconds
MB = 1024 * 1024
CHILD = """
import resource, sys, time
from comfy_api.latest import io
from graft_nodes.headless import command, hosts, workflow_file
from graft_nodes.headless.embedded import catalogue, workflow
import nodes

count = int(sys.argv[3])

class Pass(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        inputs = [io.Int.Input("a", default=0), io.Int.Input("b", default=0, optional=True)]
        return io.Schema(node_id="Pass", inputs=inputs, outputs=[io.Int.Output()])

    @classmethod
    def execute(cls, a, b=0):
        return io.NodeOutput(a)

class Show:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {f"value{number}": ("INT", {}) for number in range(count)}}

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "show", "benchmark", True

    def show(self, **values):
        return {"ui": {"values": [len(values)]}}

nodes.NODE_CLASS_MAPPINGS.update(Pass=Pass, Show=Show)
hosts.open_host(hosts.Choice(None, "benchmark"), True, None, None)
look_up = catalogue(nodes.NODE_CLASS_MAPPINGS, {})
start = time.process_time()
if sys.argv[2] == "read":
    document = workflow_file.read(sys.argv[1])
    document.class_types()
    graph, problems = workflow.set_values(document.graph(look_up), [], look_up)
    assert graph and not problems
else:
    assert command.main(["run", sys.argv[1], "--embedded", "--cpu"]) == 0
seconds = time.process_time() - start
print("MEASURED", seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def _passing(number: int, *sources: int) -> tuple[str, dict[str, Any]]:
    inputs: dict[str, Any] = {"a": number}
    for name, source in zip("ab", sources, strict=False):
        inputs[name] = [str(source), 0]
    return str(number), {"class_type": "Pass", "inputs": inputs, "_meta": {"title": f"Pass {number}"}}


def _shown(graph: dict[str, Any], *sources: int) -> dict[str, Any]:
    inputs = {f"value{number}": [str(source), 0] for number, source in enumerate(sources)}
    return {**graph, "show": {"class_type": "Show", "inputs": inputs}}


def chain(count: int) -> dict[str, Any]:
    """Each node takes the number of the one before."""
    nodes = [_passing(0)] + [_passing(number, number - 1) for number in range(1, count)]
    return _shown(dict(nodes), count - 1)


def fan(count: int) -> dict[str, Any]:
    """All nodes lead into one."""
    return _shown(dict(_passing(number) for number in range(count)), *range(count))


def grid(count: int) -> dict[str, Any]:
    """Each node takes the numbers of its left and of its upper neighbor."""
    width = max(width for width in range(1, int(count**0.5) + 1) if count % width == 0)
    nodes = []
    for number in range(count):
        sources = [number - 1] * (number % width > 0) + [number - width] * (number >= width)
        nodes.append(_passing(number, *sources))
    return _shown(dict(nodes), count - 1)


SHAPES: dict[str, Callable[[int], dict[str, Any]]] = {"chain": chain, "fan": fan, "grid": grid}


def _editor_nodes(size: int) -> Iterator[dict[str, Any]]:
    """Nodes of a chain as the editor saves them, until their text is so many bytes."""
    number = 0
    while size > 0:
        link = number if number else None
        node = {
            "id": number,
            "type": "Pass",
            "pos": [240 * (number % 100), 120 * (number // 100)],
            "size": [210, 58],
            "flags": {},
            "order": number,
            "mode": 0,
            "inputs": [{"name": "a", "type": "INT", "widget": {"name": "a"}, "link": link}],
            "outputs": [{"name": "INT", "type": "INT", "links": [number + 1]}],
            "properties": {"Node name for S&R": "Pass"},
            "widgets_values": [number, 0],
        }
        size -= len(json.dumps(node)) + 40
        number += 1
        yield node


def editor_file(size: int) -> dict[str, Any]:
    """A chain in the editor's format, as large as asked for."""
    nodes = list(_editor_nodes(size))
    nodes[-1]["outputs"][0]["links"] = []
    links = [[number, number - 1, 0, number, 0, "INT"] for number in range(1, len(nodes))]
    return {"last_node_id": len(nodes), "last_link_id": len(links), "nodes": nodes, "links": links, "version": 0.4}


def api_file(size: int) -> dict[str, Any]:
    """A chain in the API format, as large as asked for."""
    graph: dict[str, Any] = {}
    number = 0
    while size > 0:
        node_id, node = _passing(number, *[number - 1] * (number > 0))
        graph[node_id] = node
        size -= len(json.dumps(node)) + len(node_id) + 6
        number += 1
    return graph


def measure(data: dict[str, Any], what: str, inputs: int, rounds: int) -> tuple[float, float]:
    """(seconds of the best round, bytes of memory of the worst)."""
    seconds, memory = [], []
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "workflow.json"
        file.write_text(json.dumps(data), encoding="utf-8")
        for _ in range(rounds):
            code = "from graft_nodes.headless import embedded\nembedded.install()\n" + CHILD
            command = [sys.executable, "-c", code, str(file), what, str(inputs)]
            out = subprocess.run(command, check=True, cwd=place, capture_output=True, text=True).stdout
            line = next(line for line in out.splitlines() if line.startswith("MEASURED"))
            seconds.append(float(line.split()[1]))
            memory.append(float(line.split()[2]))
    return min(seconds), max(memory)


def _row(name: str, seconds: float, memory: float, goal: float) -> dict[str, Any]:
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{name}: {seconds:.2f} s of processor time, {memory / MB:.0f} MiB; {machine}", flush=True)
    return {"name": name, "value": seconds, "unit": "s", "ratio": goal / seconds, "memory": memory, "machine": machine}


def main() -> None:
    """Measure every shape and count and both formats, and check the goals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", default="200,400,800,1600,5000")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--megabytes", type=int, default=60, help="of the files that are read; 0 reads none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    rows = []
    for shape in options.shapes.split(","):
        for count in map(int, options.counts.split(",")):
            inputs = count if shape == "fan" else 1
            measured = measure(SHAPES[shape](count), "run", inputs, options.rounds)
            rows.append(_row(f"{shape}_{count}", *measured, GOAL_RUN))
    for name, file in (("api", api_file), ("editor", editor_file)):
        if options.megabytes:
            measured = measure(file(options.megabytes * MB), "read", 1, options.rounds)
            rows.append(_row(f"read_{name}_{options.megabytes}_mb", *measured, GOAL_READ))
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if all(row["ratio"] > 1 for row in rows) else 1)


if __name__ == "__main__":
    main()
