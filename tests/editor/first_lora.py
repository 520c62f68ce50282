"""The first LoRA as a person makes it: from an empty editor to an image that is sampled with it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from browsing import Editor
from serving import PATIENCE, ROOT
from templates_dialog import choose as choose_template
from test_browser_dataset import choose, drop
from test_browser_training import begins_at_the_first_step, reached
from test_browser_workflows import look_at

TEMPLATE, BLUEPRINT = "Train your first LoRA", "Train a LoRA (Graft)"
STEPS, PREVIEWS = 800, 80  # enough that Stop comes before the end, however slow the page is
WAIT = PATIENCE * 1000  # milliseconds
OUTSIDE = ".graft-outside:visible"  # the panels on the subgraph's own node
STATUS = ".graft-trained .graft-status:visible"
INNER = "app.canvas.graph.nodes.find((node) => node.type === type)"
COUNT = """() => {
  window.clicks = 0
  document.addEventListener('pointerdown', (event) => { window.clicks += event.isTrusted }, true)
}"""
INSIDE = "app.graph.nodes.find((node) => node.subgraph).subgraph.nodes.find((node) => node.type === type)"
SET = """([node, values]) => {
  for (const [name, value] of Object.entries(values)) {
    const widget = node.widgets.find((one) => one.name === name)
    widget.value = value
    widget.callback?.(value)
  }
}"""


def make(editor: Editor, place: Path, own: Path) -> None:
    """The whole story on an open page; `place` is the folder that the server works in, `own` an empty one."""
    opens_the_template(editor)
    folder = drops_a_folder(editor, own)
    chooses_it(editor, folder)
    runs_and_stops(editor)
    goes_on(editor)
    looks_at_previews(editor)
    file = saved_file(editor, place)
    samples_with(editor, file)


def make_with_few_clicks(editor: Editor, own: Path) -> None:
    """From an empty editor and a folder of pictures without captions to the saved file and pictures of it."""
    editor.do(COUNT)
    opens_the_template(editor)
    folder = own / f"twelve {'nodes2' if editor.modern else 'classic'}"
    folder.mkdir()
    for path in sorted((ROOT / "demo" / "concept").glob("*.png"))[:12]:
        shutil.copy(path, folder)
    uploads(editor, folder).get_by_role("tab", name="Images (12)").wait_for()
    editor.do(f"(values) => ({SET})([{outer()}, values])", {"steps": 20, "resolution": 64, "run": folder.name})  # quick
    editor.screenshot("few-clicks-dropped")
    presses_run(editor)
    after = "() => app.nodeOutputs?.[app.graph.nodes.find((node) => node.title === 'After').id]?.images?.length === 4"
    editor.page.wait_for_function(after, timeout=WAIT)
    editor.wait_until_idle(WAIT)
    editor.screenshot("few-clicks-trained")
    assert reached(editor) == 20
    assert editor.do("() => app.lastExecutionError ?? null") is None
    assert editor.page.get_by_role("alert").filter(visible=True).count() == 0, "no dead end"
    assert editor.do("() => window.clicks") <= 6


def opens_the_template(editor: Editor) -> None:
    """Templates, and the template by its title."""
    editor.clear()
    choose_template(editor, TEMPLATE)
    editor.page.wait_for_function("(title) => app.graph.nodes.some((node) => node.title === title)", arg=BLUEPRINT)


def drops_a_folder(editor: Editor, own: Path) -> str:
    """A folder with eight images and captions, dropped onto the subgraph's own node; its name."""
    folder = own / f"my zorps {'nodes2' if editor.modern else 'classic'}"
    folder.mkdir()
    for path in sorted((ROOT / "demo" / "concept").iterdir())[:16]:
        shutil.copy(path, folder)
    panel = uploads(editor, folder)
    panel.get_by_role("tab", name="Images (8)").wait_for()
    assert folder_outside(editor) == folder.name, "the folder that was dropped is chosen on the subgraph's node"
    editor.enter(BLUEPRINT)
    sets(editor, "TrainStep", preview_every=PREVIEWS)
    leaves(editor)
    return folder.name


def uploads(editor: Editor, folder: Path) -> Any:
    """Drop a folder onto the subgraph's own node and say yes; what the node shows."""
    panel = editor.page.locator(OUTSIDE)
    panel.get_by_role("tab", name="Images").or_(panel.get_by_role("alert").filter(has_text="folder")).first.wait_for()
    drop(editor, folder, onto=f"{OUTSIDE} .graft-scroll")
    panel.get_by_role("button", name="Upload").click()
    return panel


def chooses_it(editor: Editor, folder: str) -> None:
    """The folder, from the list on the subgraph's own node; few steps on small images."""
    sets(editor, "EmptyLatentImage", width=64, height=64, batch_size=1)
    editor.do(
        f"(values) => ({SET})([{outer()}, values])", {"steps": STEPS, "resolution": 64, "batch_size": 2, "run": folder}
    )
    editor.do(f"(values) => ({SET})([{outer()}, values])", {"folder": "graft_demo/concept"})
    look_at(editor, editor.titled(BLUEPRINT))
    if editor.modern:
        node = editor.page.locator(f"[data-node-id='{editor.titled(BLUEPRINT)}']")
        node.get_by_text("graft_demo/concept", exact=True).click()
        editor.page.get_by_role("option", name=folder).click()
    elif editor.page.locator(".graft-chooser:visible").count():  # 1.27 draws the pack's own widget there
        choose(editor, folder)
    else:
        where = editor.do(f"() => [...{outer()}.pos, {outer()}.widgets.find((one) => one.name === 'folder').last_y]")
        left, top = editor.do("() => { const box = app.canvas.canvas.getBoundingClientRect(); return [box.x, box.y] }")
        dx, dy = editor.do("() => app.canvas.ds.offset")
        editor.page.mouse.click(left + where[0] + dx + 160, top + where[1] + dy + where[2] + 10)
        editor.page.locator(".litemenu-entry", has_text=folder).click()
    editor.page.wait_for_timeout(500)
    assert folder_outside(editor) == folder
    editor.screenshot("first-lora-settings")


def runs_and_stops(editor: Editor) -> None:
    """Run, the curve grows, and Stop before the end: it says what is kept and how to go on."""
    presses_run(editor)
    at = reached(editor, 2)
    chart = editor.page.locator(".graft-trained .graft-chart:visible").element_handle()
    before = chart.evaluate("(canvas) => canvas.toDataURL()")
    reached(editor, at + 1)
    editor.page.wait_for_function("([canvas, before]) => canvas.toDataURL() !== before", arg=[chart, before])
    editor.page.locator(".graft-trained figcaption:visible").first.wait_for(timeout=WAIT)
    editor.page.locator(".graft-stop:visible").click()
    ending = editor.page.locator(STATUS).get_by_text(re.compile(rf"stopped at \d+ of {STEPS}, kept; Run continues"))
    ending.wait_for(timeout=WAIT)
    editor.screenshot("first-lora-stopped")
    editor.wait_until_idle(WAIT)
    assert PREVIEWS <= reached(editor) < STEPS, "stopped after a preview and before the end"


def goes_on(editor: Editor) -> None:
    """Run again: the same run goes on to its end, and its curve is whole."""
    stopped = state(editor)
    presses_run(editor)
    moved_on = f"([type, key]) => {INSIDE}.properties['graft run'].key !== key"
    editor.page.wait_for_function(moved_on, arg=["TrainStep", stopped["key"]], timeout=WAIT)
    editor.wait_until_idle(WAIT)
    whole = state(editor)
    assert whole["step"] == STEPS == reached(editor, STEPS)
    assert whole["history"]["loss"][: stopped["step"]] == stopped["history"]["loss"], "it did not start over"
    assert begins_at_the_first_step(editor)
    assert "stopped" not in editor.page.locator(STATUS).inner_text()


def looks_at_previews(editor: Editor) -> None:
    """Step by step with the slider, two steps side by side, and one over the whole page."""
    page = editor.page
    figures = page.locator(".graft-trained figure:visible")
    slider = page.get_by_label("Step of the previews")
    slider.focus()
    page.keyboard.press("Home")
    assert figures.first.inner_text() == f"step {PREVIEWS}, weights"
    page.keyboard.press("End")
    assert figures.first.inner_text() == f"step {STEPS}, weights"
    page.get_by_role("checkbox", name="Compare").check()
    first, last = figures.all_inner_texts()[:2]
    assert (first, last) == (f"step {PREVIEWS}, weights", f"step {STEPS}, weights")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.graft-trained img')].every((one) => one.naturalWidth > 0)"
    )
    editor.screenshot("first-lora-previews")
    page.get_by_title("Enlarge").first.click()
    page.locator("dialog figure").first.wait_for()
    page.wait_for_function("() => [...document.querySelectorAll('dialog img')].every((one) => one.naturalWidth > 0)")
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")
    page.get_by_role("checkbox", name="Compare").uncheck()


def saved_file(editor: Editor, place: Path) -> Path:
    """The LoRA's file, whose path the template shows."""
    shown = editor.do("() => app.nodeOutputs[app.graph.nodes.find((node) => node.type === 'PreviewAny').id].text")
    file = Path("".join(shown))
    assert file.is_file() and file.parent == place / "output" / "loras" and file.suffix == ".safetensors"
    return file


def samples_with(editor: Editor, file: Path) -> None:
    """Another workflow: the file through the rows of Load LoRAs, and an image."""
    editor.do("() => app.extensionManager.command.execute('Comfy.NewBlankWorkflow')")
    editor.page.wait_for_timeout(800)
    editor.clear()
    editor.do("() => app.refreshComboInNodes()")
    demo, rows = editor.add("GraftDemo", 40, 100), editor.add("GraftLoadLoRAs", 360, 100)
    text = editor.add("CLIPTextEncode", 800, 100, text="a zorp middle")
    latent = editor.add("EmptyLatentImage", 800, 380, width=64, height=64)
    sampler = editor.add("KSampler", 1220, 100, steps=2, cfg=1.0)
    decode, save = editor.add("VAEDecode", 1220, 480), editor.add("SaveImage", 1220, 600, filename_prefix="with_it")
    for source, output, target, name in (
        (demo, 0, rows, "model"),
        (demo, 1, rows, "clip"),
        (rows, 1, text, "clip"),
        (rows, 0, sampler, "model"),
        (text, 0, sampler, "positive"),
        (text, 0, sampler, "negative"),
        (latent, 0, sampler, "latent_image"),
        (sampler, 0, decode, "samples"),
        (demo, 2, decode, "vae"),
        (decode, 0, save, "images"),
    ):
        editor.link(source, output, target, name)
    editor.page.locator(".graft-add:visible").click()
    editor.page.locator(".graft-picker-search:visible").fill(file.stem)
    editor.page.keyboard.press("Enter")
    editor.page.locator(".graft-file:visible").get_by_text(file.stem).wait_for()
    presses_run(editor)
    ended = "app.lastExecutionError || Object.keys(app.lastNodeErrors ?? {}).length"
    editor.page.wait_for_function(
        f"(id) => app.nodeOutputs?.[id]?.images?.length || {ended}", arg=str(save), timeout=WAIT
    )
    assert len(editor.do("(id) => app.nodeOutputs?.[id]?.images ?? []", str(save))) == 1
    notes = editor.page.locator(".graft-stack:visible .graft-note").all_inner_texts()
    assert "".join(notes) == "", "nothing is wrong with the row"
    editor.screenshot("first-lora-sampled")


def presses_run(editor: Editor) -> None:
    """The editor's own Run."""
    editor.page.get_by_role("button", name="Run", exact=True).first.click()


def sets(editor: Editor, kind: str, **values: Any) -> None:
    """Give the widgets of the node of this kind values."""
    editor.do(f"([type, values]) => ({SET})([{INNER}, values])", [kind, values])


def leaves(editor: Editor) -> None:
    """Go back out of the subgraph."""
    editor.do("() => { app.canvas.setGraph(app.rootGraph ?? app.graph); app.canvas.setDirty(true, true) }")
    editor.page.wait_for_timeout(500)


def outer() -> str:
    """JavaScript for the subgraph's own node."""
    return f"(app.rootGraph ?? app.graph).nodes.find((one) => one.title === '{BLUEPRINT}')"


def folder_outside(editor: Editor) -> str:
    """The folder that the subgraph's own node says, which is the one in the prompt."""
    (dataset,) = (node for node in editor.prompt().values() if node["class_type"] == "GraftDataset")
    shown = editor.do(f"() => {outer()}.widgets.find((one) => one.name === 'folder').value")
    assert dataset["inputs"]["folder"] == shown
    return shown


def state(editor: Editor) -> dict[str, Any]:
    """What the store has of the run that the Train Step in the subgraph shows."""
    kept = editor.do(f"(type) => {INSIDE}.properties['graft run']", "TrainStep")
    return {
        **editor.do("(k) => fetch(`/graft/runs/${k.run}/${k.key}`).then((r) => r.json())", kept),
        "key": kept["key"],
    }
