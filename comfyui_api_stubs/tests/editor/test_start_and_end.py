"""How the editor's server starts, what it says, and how it ends."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from comfyui_api_stubs.tests.editor.serving import IMPORTABLE, Server, front_end, shows, steps


@pytest.fixture
def place(tmp_path):
    front_end(tmp_path / "front")
    return tmp_path


def start(place, *options, port=0):
    return Server(place, "--front-end-root", str(place / "front"), *options, port=port)


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to send there")
def test_ctrl_c_interrupts_what_runs_and_keeps_what_was_done(place):
    server = start(place)
    assert server.port > 0 and server.ask("/prompt").status == 200
    done = server.queue(shows("before")).json["prompt_id"]
    server.wait(done)
    running = server.queue(steps(10_000)).json["prompt_id"]
    server.queue(shows("never"))
    server.wait_until_running(running)
    assert server.stop(signal.SIGINT) == 0
    said = "\n".join(server.lines)
    assert (
        "1 queued workflow was not run" in said and said.rstrip().endswith("editor: ended") and "Traceback" not in said
    )
    assert (place / "output" / "before_00001_.png").is_file()
    again = start(place, port=server.port)  # the port is free at once, and what the user saved is there
    assert again.port == server.port and again.ask("/view?filename=before_00001_.png").status == 200
    assert again.stop(signal.SIGTERM) == 0


def said(place, *options):
    command = [sys.executable, "-m", "comfyui_api_stubs", "editor", "--no-browser", *options]
    environment = {**os.environ, "PYTHONPATH": IMPORTABLE}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_what_is_missing_or_taken_is_said(place):
    other = said(place, "--front-end-root", str(place))
    assert other.returncode == 2 and "is not ComfyUI's front end: it has no index.html" in other.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        busy = said(place, "--port", port, "--front-end-root", str(place / "front"))
    assert busy.returncode == 2 and f"cannot listen on 127.0.0.1 port {port}" in busy.stderr and "--port" in busy.stderr


def test_beyond_this_machine_it_warns_and_answers_by_address_only(place):
    server = start(place, "--listen", "0.0.0.0")
    try:
        assert any("there are no passwords" in line for line in server.lines) and server.host == "127.0.0.1"
        assert server.raw("GET", b"/prompt", {"Host": f"192.168.1.5:{server.port}"}).status == 200
        for host in ("evil.example", f"evil.example:{server.port}"):
            assert server.raw("GET", b"/prompt", {"Host": host}).status == 403
        assert server.raw("POST", b"/interrupt", {"Host": "192.168.1.5", "Origin": "http://192.168.1.6"}).status == 403
    finally:
        server.stop()
