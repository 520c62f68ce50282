"""Preference pairs from the gallery of Train Step: of two compared previews a person says which is better."""

import shutil
import types

import pytest
from test_browser_training import SEND, feed
from test_server_preferences import save_preview

RUN = "marked in the gallery"


@pytest.fixture
def server(browsed):
    """Where the browser's server works, as save_preview wants it, without what an earlier test has marked."""
    shutil.rmtree(browsed / "input" / "graft_preferences", ignore_errors=True)
    return types.SimpleNamespace(place=browsed)


def tell(editor, node, server, prompt, text):
    """Previews of two steps, kept on the disk and told to the page; their paths."""
    paths = []
    for step, color in ((10, "red"), (20, "blue")):
        name = save_preview(server, RUN, step, color, prompt, text)
        picture = {"filename": name, "subfolder": f"graft/{RUN}/previews", "type": "output", "label": "weights"}
        words = {"prompt": prompt, "text": text} if prompt else {}
        detail = {"node": str(node), "run": "r", "step": step, "pictures": [{**picture, **words}]}
        editor.do(SEND, ["graft.preview", detail])
        paths.append(server.place / "output" / "graft" / RUN / "previews" / name)
    return paths


def test_the_better_of_two_compared_previews_is_marked_and_the_files_are_a_pair(editor, server):
    editor.clear()
    node, page = editor.add("TrainStep", 160, 20), editor.page
    feed(editor, node, [0.2] * 30)
    red, blue = tell(editor, node, server, 1, "a zorp")
    verdicts = page.locator(".graft-training").get_by_role("button", name="This one is better")
    said = page.locator(".graft-training .graft-gallery > [role=status]:visible")
    assert verdicts.count() == 0, "there is one picture of the prompt"
    page.get_by_role("checkbox", name="Compare").check()
    assert verdicts.count() == 2
    folder = server.place / "input" / "graft_preferences" / RUN

    def holds(win, lose):
        found = {path.name.split(".", 1)[1]: path.read_bytes() for path in folder.iterdir()}
        return found == {"win.jpg": win.read_bytes(), "lose.jpg": lose.read_bytes(), "txt": b"a zorp"}

    verdicts.nth(1).focus()
    page.keyboard.press("Enter")
    said.get_by_text(f"1 pair in graft_preferences/{RUN}: choose this folder in Dataset").wait_for()
    assert holds(blue, red)
    assert verdicts.all_inner_texts() == ["This one is better", "✓ This one is better"]
    assert verdicts.nth(1).evaluate("(one) => one === document.activeElement"), "the keyboard stays where it was"
    editor.screenshot("training-preferred")
    page.get_by_title("Enlarge").first.click()  # the other way round, over the whole page
    large = page.locator("dialog").get_by_role("button", name="This one is better")
    large.first.click()
    large.first.get_by_text("✓").wait_for()
    assert page.locator("dialog").get_by_text("1 pair in graft_preferences").count() == 1
    assert large.all_inner_texts() == ["✓ This one is better", "This one is better"] and holds(red, blue)
    editor.screenshot("training-preferred-large")
    page.keyboard.press("Escape")
    page.locator("dialog").wait_for(state="detached")
    assert verdicts.all_inner_texts() == ["✓ This one is better", "This one is better"]

    tell(editor, node, server, 0, "")
    page.wait_for_function("() => document.querySelectorAll('.graft-training .graft-verdict').length === 4")
    verdicts.last.click()
    said.get_by_text("The text of the prompt is not known: write the caption of steps-10-20-").wait_for()
    assert said.inner_text().startswith("2 pairs in graft_preferences/")

    red.unlink()
    verdicts.first.click()
    said.get_by_text("The pair is not kept: the preview of step 10 has been removed; choose another step").wait_for()
    editor.settle()
    editor.errors[:] = [error for error in editor.errors if "/graft/preferences" not in error and "404" not in error]
