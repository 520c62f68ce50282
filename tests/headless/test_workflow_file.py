"""Workflow files that cannot be read, and workflows inside of other files."""

import json

import pytest
from graft_nodes.headless import workflow_file
from graft_nodes.headless.embedded import WorkflowError
from PIL import Image
from PIL.PngImagePlugin import PngInfo


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not JSON (line 1, column 2"),
        ("[]", "not a workflow"),
        ("{}", "got an empty object"),
        ('{"1": 3}', "these entries are not nodes: 1"),
        ('{"1": {"class_type": "X", "inputs": []}}', "these entries are not nodes: 1"),
    ],
)
def test_what_is_not_a_workflow_is_refused(tmp_path, text, expected):
    path = tmp_path / "w.json"
    path.write_text(text)
    with pytest.raises(WorkflowError) as error:
        workflow_file.read(str(path))
    assert expected in str(error.value) and str(path) in str(error.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "picture.json").write_bytes(b"\xff\xd8\xff\xe0\xff\xfe\x00")
    (tmp_path / "wide.json").write_text("{}", encoding="utf-16")
    text, read = "not a text file in UTF-8", "cannot be read"
    for name, expected in (("none.json", read), ("picture.json", text), ("wide.json", text), (".", read)):
        with pytest.raises(WorkflowError, match=expected) as error:
            workflow_file.read(str(tmp_path / name))
        assert str(tmp_path / name) in str(error.value)


def test_a_picture_with_a_workflow_inside_is_read_and_one_without_is_refused(tmp_path):
    graph, texts = {"1": {"class_type": "OddSource", "inputs": {}}}, PngInfo()
    texts.add_text("prompt", json.dumps(graph))
    Image.new("RGB", (2, 2)).save(tmp_path / "with.png", pnginfo=texts)
    Image.new("RGB", (2, 2)).save(tmp_path / "without.png")
    assert workflow_file.read(str(tmp_path / "with.png")).data == graph
    with pytest.raises(WorkflowError, match="it holds no workflow") as error:
        workflow_file.read(str(tmp_path / "without.png"))
    assert str(tmp_path / "without.png") in str(error.value)
