"""How long the training panel takes to redraw with 100,000 points, in a profile that the browser records.

python benchmarks/editor.py [--points 100000] [--redraws 200] [--json FILE] [--profile FILE]

It starts `python -m graft_nodes editor` in a temporary folder, opens ComfyUI's own front end in Chromium without a
window, puts a Train Step on the canvas, feeds it as many `graft.step` events as there are points, the last ones a frame
each, while the browser's sampling profiler runs. A redraw is a stretch of samples in Graft's scripts: what the panel
computes and draws, and the style and layout it asks for; what the browser paints afterwards, in another process, is not
in it. It needs a Chromium and playwright. --profile keeps the recording, which the browser's developer tools open.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "editor"))
GOAL = 5.0  # milliseconds
SCRIPTS = ("training.js", "chart.js", "dom.js", "texts.js")
INTERVAL = 100  # microseconds between samples
FEED = """([id, from, until, points]) => {
  const api = app.api ?? window.comfyAPI.api.api
  for (let step = from; step <= until; step++) {
    const detail = {
      node: String(id), run: 'benchmark', step, until: points, loss: 0.05 + 0.1 * Math.random(), rate: 1e-4, norm: 1,
      validation: step % 500 ? null : 0.1, speed: 10, left: 100, memory: 2e9,
    }
    api.dispatchEvent(new CustomEvent('graft.step', {detail}))
  }
}"""
# One event a frame, which is one redraw a frame.
REDRAW = """async ([id, from, count, points, feed]) => {
  const send = eval(feed)
  for (let step = from; step < from + count; step++) {
    send([id, step, step, points])
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))
  }
}"""


def redraws(profile: dict[str, Any]) -> list[float]:
    """Milliseconds of every stretch of samples in which the panel draws: in its scripts and what they call, but not in
    taking an event.
    """
    below = _drawing({node["id"]: node for node in profile["nodes"]}, profile["nodes"][0]["id"])
    found, running, outside = [], 0.0, 0.0
    for sample, delta in zip(profile["samples"], profile["timeDeltas"], strict=True):
        if sample in below:
            running, outside = running + delta + (outside if running else 0.0), 0.0
        else:
            outside += delta
            if running and outside > 2000:  # microseconds: the next frame is farther away than a pause inside one
                found.append(running / 1000)
                running = 0.0
    return found + ([running / 1000] if running else [])


def _drawing(nodes: dict[int, Any], root: int) -> set[int]:
    """The nodes of the call tree that lie in the panel's scripts or below them, without those of its `step`, which
    takes an event.
    """
    below, left = set(), [(root, False)]
    while left:
        node_id, inside = left.pop()
        frame = nodes[node_id]["callFrame"]
        ours = frame["url"].rpartition("/")[2] in SCRIPTS and "/extensions/" in frame["url"]
        if ours and frame["functionName"] == "step":
            continue
        if inside or ours:
            below.add(node_id)
        left += [(child, inside or ours) for child in nodes[node_id].get("children", ())]
    return below


def record(points: int, count: int) -> tuple[dict[str, Any], str]:
    """(the browser's profile of `count` redraws, the browser's name)."""
    import browsing
    import serving
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as place, sync_playwright() as running:
        server = serving.Server(Path(place))
        browser = running.chromium.launch(executable_path=browsing.browser_path(), args=["--no-sandbox"])
        try:
            editor = browsing.Editor(browser, server.address, False)
            editor.clear()
            node = editor.add("TrainStep", 100, 100)
            first = points - count
            editor.do(FEED, [node, 1, first, points])
            editor.page.get_by_text(f"step {first}").first.wait_for()
            session = editor.page.context.new_cdp_session(editor.page)
            session.send("Profiler.enable")
            session.send("Profiler.setSamplingInterval", {"interval": INTERVAL})
            session.send("Profiler.start")
            editor.do(REDRAW, [node, first + 1, count, points, FEED])
            profile = session.send("Profiler.stop")["profile"]
            assert not editor.errors, editor.errors
            shown = editor.page.locator(".graft-training .graft-status").first.inner_text()
            assert f"step {points}" in shown, f"the panel did not reach the last point: {shown}"
            return profile, browser.version
        finally:
            browser.close()
            server.stop()


def main() -> None:
    """Record, say what a redraw takes, and check the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=100_000)
    parser.add_argument("--redraws", type=int, default=200)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--profile", metavar="FILE")
    options = parser.parse_args()
    profile, browser = record(options.points, options.redraws)
    if options.profile:
        Path(options.profile).write_text(json.dumps(profile), encoding="utf-8")
    times = sorted(redraws(profile))
    assert len(times) >= 0.8 * options.redraws, (
        f"{len(times)} redraws are in the profile, expected about {options.redraws}"
    )
    median, late, worst = statistics.median(times), times[int(0.95 * len(times))], times[-1]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Chromium {browser}"
    spread = f"95% within {late:.2f}, the longest {worst:.2f}, of {len(times)}; goal {GOAL:g}"
    print(f"{options.points} points: a redraw takes {median:.2f} ms ({spread}); {machine}")
    if options.json:
        more = {"late": late, "worst": worst, "machine": machine}
        rows = [{"name": "redraw_100k", "value": median, "unit": "ms", "ratio": GOAL / median, **more}]
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if median < GOAL else 1)


if __name__ == "__main__":
    main()
