"""Graft's templates in the front end's own dialog: each of them is found by its title and has its picture."""

from __future__ import annotations

from browsing import Editor
from serving import ROOT

TITLES = [path.stem for path in sorted((ROOT / "example_workflows").glob("*.json"))]
# Whether a template's title and picture are there; they are drawn as they come into sight, and again as others come.
PICTURE_OF = """(title) => {
  const found = (kind) => [...document.querySelectorAll(`[role=dialog] ${kind}`)]
  found('h3').find((one) => one.textContent.trim() === title)?.scrollIntoView({block: 'center'})
  return found('img').find((one) => one.alt === title)?.naturalWidth > 300
}"""


def pack_of(editor: Editor) -> str:
    """The folder's name under which the host has Graft."""
    return editor.do("() => LiteGraph.registered_node_types.TrainStep.nodeData.python_module.split('.').pop()")


def choose(editor: Editor, title: str) -> None:
    """Open a template by its title, in the search: front end 1.27 draws no more than the first dozen at once."""
    editor.page.locator(".side-tool-bar-container").get_by_text("Templates", exact=True).click()
    heading = editor.page.get_by_role("heading", name=title, exact=True)
    search = editor.page.get_by_role("dialog").get_by_placeholder("Search").first
    search.wait_for()
    every = editor.page.get_by_role("dialog").get_by_text("All Templates", exact=True)
    if every.count():
        every.first.click()  # on its first start the editor shows ComfyUI's own templates for beginners alone
    search.fill(title)
    dialog = editor.page.get_by_role("dialog").filter(has=heading)
    dialog.locator(heading).first.wait_for()
    editor.page.wait_for_timeout(500)  # the list is drawn anew with what is found
    dialog.locator(heading).first.click()
    dialog.wait_for(state="detached")
    editor.settle()


def are_found(editor: Editor) -> None:
    """By the search, and with all others of the pack under its name; front end 1.27 has only the search.

    The embedded host has no other templates, and says of Graft's what ComfyUI says of its own: a real ComfyUI knows the
    titles and pictures of a pack's templates alone, and no description of them.
    """
    page, pack = editor.page, pack_of(editor)
    page.locator(".side-tool-bar-container").get_by_text("Templates", exact=True).click()
    dialog = page.get_by_role("dialog").first
    every = dialog.get_by_text("All Templates", exact=True)
    every.or_(dialog.get_by_text("Custom Nodes", exact=True)).first.wait_for()
    if every.count():
        every.first.click()  # on its first start the editor shows ComfyUI's own templates for beginners alone
    search = dialog.get_by_placeholder("Search").first
    for title in TITLES:  # the dialog draws those that are in sight
        search.fill(title)
        dialog.get_by_role("heading", name=title, exact=True).first.wait_for()
        if every.count():
            page.wait_for_function(PICTURE_OF, arg=title, polling=300)
    search.fill("")
    if every.count():
        dialog.get_by_text(pack, exact=True).first.click()
        shown = f"Showing {len(TITLES)} of {len(TITLES)} templates"  # each of them once
        dialog.get_by_text(shown).wait_for()
        for title in TITLES:
            page.wait_for_function(PICTURE_OF, arg=title, polling=300)
        editor.screenshot(f"templates-of-{pack}")
    assert "0 of 0" not in dialog.inner_text()
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
