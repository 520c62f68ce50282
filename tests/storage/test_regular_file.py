"""A reader never waits for a pipe, and names what lies in the place of a file. What a reader must not wait for is
tried in a thread that a pipe's writer would free.
"""

import os
import socket
import threading

import pytest
from graft_nodes.headless import workflow_file
from graft_nodes.headless.embedded import WorkflowError
from graft_nodes.patches.lora_files import open_file
from graft_nodes.storage import regular_file
from graft_nodes.storage.bounded_read import read_bounded, read_json
from graft_nodes.storage.digest import sha256_of_file
from graft_nodes.storage.pictures import open_picture
from graft_nodes.storage.regular_file import NotAFile, open_regular
from graft_nodes.storage.safetensors import load_safetensors, load_shapes, read_header
from graft_nodes.training.data import captions
from graft_nodes.training.store import store

has_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes")


def in_time(call, pipes):
    """What a call returns or raises. A call that waits for a pipe is freed, and fails the test."""
    came = []

    def run():
        try:
            came.append(call())
        except Exception as error:  # noqa: BLE001  (whatever it is, the test looks at it)
            came.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    waited = thread.is_alive()
    for pipe in pipes if waited else ():
        os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))
    assert not waited, "it waits for the pipe"
    return came[0]


def read_picture(path):
    with open_picture(path) as picture:
        return picture.load()


READERS = {
    "open": lambda path: open_regular(path).close(),
    "bounded": lambda path: read_bounded(path, 100),
    "json": lambda path: read_json(path, 100),
    "digest": sha256_of_file,
    "safetensors": lambda path: load_safetensors(str(path)),
    "header": lambda path: read_header(str(path)),
    "shapes": lambda path: load_shapes(str(path)),
    "picture": read_picture,
    "caption": captions.read_text,
    "workflow": lambda path: workflow_file.read(str(path)),
    "LoRA": lambda path: open_file.load(str(path)),
    "header of a LoRA": lambda path: open_file.read_lora_header(str(path)),
    "file of a state": lambda path: store.check_file(path, "0"),
}


@has_pipes
@pytest.mark.parametrize("name", READERS)
def test_no_reader_waits_for_a_pipe(tmp_path, name):
    path = tmp_path / "state.safetensors"
    os.mkfifo(path)
    came = in_time(lambda: READERS[name](path), [path])
    assert isinstance(came, (OSError, ValueError, WorkflowError)) and "a pipe, not a file" in str(came)


@pytest.mark.parametrize("name", READERS)
def test_a_folder_in_the_place_of_a_file_is_named(tmp_path, name):
    path = tmp_path / "state.safetensors"
    path.mkdir()
    with pytest.raises((OSError, ValueError, WorkflowError)) as error:
        READERS[name](path)
    assert "a folder, not a file" in str(error.value)


@has_pipes
def test_a_socket_and_a_device_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("s")
        with pytest.raises(NotAFile, match="it is a socket, not a file"):
            open_regular("s")
    with pytest.raises(NotAFile, match="it is a device, not a file"):
        open_regular("/dev/zero")


@has_pipes
def test_a_pipe_that_takes_the_file_s_place_meanwhile_is_not_waited_for(tmp_path, monkeypatch):
    path = tmp_path / "a"
    os.mkfifo(path)
    monkeypatch.setattr(regular_file, "require_regular", lambda path: None)
    came = in_time(lambda: open_regular(path), [path])
    assert isinstance(came, NotAFile)


def test_links_are_followed_and_bytes_are_read(tmp_path):
    (tmp_path / "a").write_bytes(b"ab\r\n\x1a\x00c")
    (tmp_path / "link").symlink_to("a")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"ab\r\n\x1a\x00c"
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")
