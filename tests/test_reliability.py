"""docs/reliability.md names tests that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_test_that_the_document_names_is_there():
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    folders = (ROOT / "comfyui_api_stubs" / "tests", ROOT / "tests")
    known = {path.name: path for folder in folders for path in sorted(folder.rglob("*.py"))}
    named, last = [], None
    for file, test in re.findall(r"`([\w/]*\w+\.py)?(?:::(test_\w+…?))?`", text):
        if not file and not test:
            continue
        path = (ROOT / file if "/" in file else known.get(file)) if file else last
        assert path is not None and path.is_file(), f"there is no {file}"
        last = path
        if test:
            named.append(test)
            found = re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
            start = test.rstrip("…")
            assert any(name == start or (test != start and name.startswith(start)) for name in found), (
                f"{path.name} has no {test}"
            )
    assert len(named) > 15
