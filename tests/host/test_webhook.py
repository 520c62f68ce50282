"""The webhook, posted to real servers on this machine: what arrives, and what is said where nothing does."""

import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from graft_nodes.host import events, webhook


@contextlib.contextmanager
def listening(status=200, headers=()):
    """A server that answers with a status; yields its address and the requests that it got."""
    got = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.headers["Content-Type"], self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self):
            got.append((self.path, "GET", b""))

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/secret?token=abc", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_small_json_object_is_posted_to_the_address_of_the_environment(monkeypatch):
    with listening(204) as (address, got):
        monkeypatch.setenv("GRAFT_WEBHOOK", f" {address} ")
        assert webhook.post({"run": "männlich", "loss": float("nan"), "step": 3}) == ""
    ((path, kind, body),) = got
    assert path == "/secret?token=abc" and kind == "application/json"
    assert json.loads(body) == {"run": "männlich", "loss": None, "step": 3}


def test_without_an_address_nothing_is_posted(monkeypatch):
    monkeypatch.delenv("GRAFT_WEBHOOK", raising=False)
    assert webhook.post({"run": "r"}) == ""


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_followed_nowhere(monkeypatch, status):
    with listening() as (elsewhere, others), listening(status, [("Location", elsewhere)]) as (address, got):
        monkeypatch.setenv("GRAFT_WEBHOOK", address)
        said = webhook.post({"run": "r"})
    assert len(got) == 1 and others == []
    assert f"it answered {status}, another address, which is not followed" in said and "token" not in said


@pytest.mark.parametrize("status", [400, 404, 500])
def test_a_refusal_is_said_without_the_address(monkeypatch, status):
    with listening(status) as (address, _):
        monkeypatch.setenv("GRAFT_WEBHOOK", address)
        assert webhook.post({}) == f"the webhook (GRAFT_WEBHOOK) was not reached: it answered {status}"


def test_an_address_where_nobody_listens_or_no_http_is_spoken_is_said(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("GRAFT_WEBHOOK", f"http://127.0.0.1:{port}/token")
    assert "refused" in webhook.post({}) and "token" not in webhook.post({})

    with socket.create_server(("127.0.0.1", 0)) as server:

        def babble():
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"not http\r\n\r\n")

        thread = threading.Thread(target=babble)
        thread.start()
        monkeypatch.setenv("GRAFT_WEBHOOK", f"http://127.0.0.1:{server.getsockname()[1]}/token")
        assert webhook.post({}).endswith("was not reached: BadStatusLine")
        thread.join()


def test_a_silent_address_does_not_hold_up_the_workflow(monkeypatch):
    monkeypatch.setattr(webhook, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and never answers
        monkeypatch.setenv("GRAFT_WEBHOOK", f"http://127.0.0.1:{server.getsockname()[1]}/")
        said = webhook.post({})
    assert "no answer within 0.2 seconds" in said or "timed out" in said or said.endswith("TimeoutError")


@pytest.mark.parametrize(
    "address",
    [
        "ftp://example.com/x",
        "file:///etc/passwd",
        "example.com/hook",
        "https://",
        "https:///hook",
        "https://user:password@example.com/hook",
        "https://example.com:port/hook",
        "https://example.com:0/hook",
        "https://example.com:99999/hook",
        "https://example.com/a b",
        "https://example.com/\r\nX-Header: 1",
        "https://exämple.com/hook",
        "https://[::1/hook",
    ],
)
def test_what_is_no_address_is_refused_and_not_quoted(monkeypatch, address):
    said = []
    for text in (address, "nothing of the kind"):
        monkeypatch.setenv("GRAFT_WEBHOOK", text)
        with pytest.raises(ValueError, match="GRAFT_WEBHOOK is not an address") as refusal:
            webhook.address()
        said.append(str(refusal.value))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("raised", "stops", "ended"), [(None, False, "done"), (None, True, "stopped"), (ZeroDivisionError, False, "failed")]
)
def test_how_a_call_ended_is_told(monkeypatch, raised, stops, ended):
    call = events.TrainingCall("7", "w", "mine", "k" * 64, "s" * 64, 4)
    measured = {"loss": 0.25, "rate": 1.0, "norm": 2.0, "validation": 0.5, "average": None}
    with listening() as (address, got):
        monkeypatch.setenv("GRAFT_WEBHOOK", address)
        with contextlib.suppress(ZeroDivisionError), events.announce_call(call):
            for step in range(1, 4 if ended != "done" else 5):
                call.report_step({"step": step, **measured})
            if stops:
                call.stopping.set()
            if raised:
                raise raised
    ((_, _, body),) = got
    told = json.loads(body)
    assert told.pop("seconds") >= 0
    steps = 4 if ended == "done" else 3
    expected = {"run": "mine", "ended": ended, "step": steps, "until": 4, "steps": steps, "loss": 0.25, "held_out": 0.5}
    assert told == expected and call.problem == ""


def test_nothing_is_told_of_a_result_that_was_stored_or_by_another_rank(monkeypatch):
    with listening() as (address, got):
        monkeypatch.setenv("GRAFT_WEBHOOK", address)
        with events.announce_call(events.TrainingCall("7", "w", "mine", "k" * 64, "s" * 64, 4)):
            pass
        call = events.TrainingCall("7", "w", "mine", "k" * 64, "s" * 64, 4, is_first_rank=False)
        with events.announce_call(call):
            call.report_step({"step": 1, "loss": 1.0, "rate": 1.0, "norm": 1.0, "validation": None, "average": None})
    assert got == []
