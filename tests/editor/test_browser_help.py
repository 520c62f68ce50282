"""The links of the help pages, in the panel that shows them: each leads to where it says, in this window.

GRAFT_TEST_FRONT_END names another front end to open them in.
"""

import re

import pytest
from serving import ROOT

# The same place shows them where Nodes 2.0 draws the nodes.
pytestmark = pytest.mark.parametrize("page", [pytest.param(False, id="classic")], indirect=True)
DOCS = ROOT / "web" / "docs"
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)]+)\)")
INFO = "[data-testid=info-button], button:has(i.icon-\\[lucide--info\\])"
CONTENT = "[...document.querySelectorAll('.node-help-content')].find((one) => one.offsetParent)"
LINKS = f"() => [...{CONTENT}.querySelectorAll('a[href]')].filter((one) => one.offsetParent)"
# The headings of the page that is shown, and those of them that the panel shows now, from its top.
SHOWN = f"""() => {{
  const headings = [...{CONTENT}.querySelectorAll('h1, h2, h3')].filter((one) => one.offsetParent)
  let panel = {CONTENT}
  const scrolls = (one) => one.scrollHeight > one.clientHeight && getComputedStyle(one).overflowY === 'auto'
  while (panel.parentElement && !scrolls(panel)) panel = panel.parentElement
  const {{ top, bottom }} = panel.getBoundingClientRect()
  const inSight = headings.filter((one) => {{
    const box = one.getBoundingClientRect()
    return box.top > top - 5 && box.bottom < bottom + 5
  }})
  return [headings[0].textContent, inSight.map((one) => one.textContent)]
}}"""


def pages_with_links():
    return sorted(path.stem for path in DOCS.glob("*.md") if LINK.search(path.read_text(encoding="utf-8")))


def name_of(heading):
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def title_of(page):
    return (DOCS / page).read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def open_help(editor, name):
    editor.clear()
    node = editor.add(name, 500, 150)
    editor.do("(id) => app.canvas.selectNode(app.graph.getNodeById(id))", node)
    picture = editor.page.locator(f".node-help-content img[src*='/docs/{name}.png']")
    if not picture.count():  # a panel that is open may follow the selection
        editor.page.locator(INFO).first.dispatch_event("click")
    picture.first.wait_for()
    picture.first.evaluate("(image) => image.decode()")
    editor.settle()


@pytest.mark.parametrize("name", pages_with_links())
def test_every_link_of_a_help_page_leads_to_where_it_says(editor, name):
    others = []
    editor.page.context.on("page", lambda opened: others.append(opened))
    editor.page.on("download", lambda loaded: others.append(loaded))
    open_help(editor, name)
    own = title_of(f"{name}.md")
    found = editor.do(f"() => ({LINKS})().map((one) => one.getAttribute('href'))")
    addresses = [address.rpartition("/docs/")[2] for address in found]  # front end 1.58 writes whole paths
    assert addresses == LINK.findall((DOCS / f"{name}.md").read_text(encoding="utf-8"))
    where = editor.page.url
    for at, address in enumerate(addresses):
        if "://" in address:  # another site's page, which opens in a window of its own
            continue
        page, _, anchor = address.partition("#")
        editor.do(f"(at) => ({LINKS})()[at].click()", at)
        editor.settle()
        title, in_sight = editor.do(SHOWN)
        assert title == (title_of(page) if page else own), address
        assert (anchor or name_of(title)) in map(name_of, in_sight), (address, in_sight)
        assert editor.page.url == where and not others, address
        if page:
            editor.screenshot(f"help-of-{page.removesuffix('.md')}")
            editor.page.locator(".graft-help .graft-button").click()
            assert editor.do(SHOWN)[0] == own
    assert not others and not editor.page.context.pages[1:]


def test_another_nodes_help_takes_the_place_of_the_page_that_a_link_showed(editor):
    open_help(editor, "GraftObjective")
    editor.page.locator(".node-help-content a[href*='GraftDataset.md']").first.click()
    editor.page.locator(".graft-help").wait_for()
    assert editor.do(SHOWN)[0] == title_of("GraftDataset.md")
    open_help(editor, "GraftAdapter")
    assert editor.page.locator(".graft-help").count() == 0 and editor.do(SHOWN)[0] == title_of("GraftAdapter.md")


def test_a_page_in_another_language_leads_to_pages_in_that_language(editor):
    """Front end 1.58 makes whole paths of the addresses in it, the others leave them as they are."""
    for address in (
        "../GraftDataset/zh.md#偏好对",
        "PACK/GraftDataset/zh.md#偏好对",
        "PACK/docs/../GraftDataset/zh.md",
    ):
        open_help(editor, "GraftObjective")
        editor.do(
            f"""(address) => {{
              const link = {CONTENT}.querySelector('a[href*="GraftDataset.md"]')
              const [pack] = {CONTENT}.querySelector('img').src.match(/\\/extensions\\/[^/]+/)
              link.setAttribute('href', address.replace('PACK', pack))
              link.click()
            }}""",
            address,
        )
        editor.page.locator(".graft-help").wait_for()
        title, in_sight = editor.do(SHOWN)
        assert title == title_of("GraftDataset/zh.md")
        assert not address.endswith("偏好对") or "偏好对" in in_sight
