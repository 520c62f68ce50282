"""Tells an address of the owner's that a training step has ended: one POST of a small JSON object.

The address comes from the environment alone, so that a workflow of a stranger's can send nothing anywhere.
"""

from __future__ import annotations

import http.client
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from .browser_json import text_of

SECONDS = 10.0  # that sending may take, so that a silent address does not hold up the workflow


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Ends at the address itself: what is posted there goes nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        return None


def address() -> str:
    """The owner's address; "" where none is set.

    Raises ValueError for what cannot be one. The message does not quote it: such addresses have a secret in them.
    """
    text = os.environ.get("GRAFT_WEBHOOK", "").strip()
    if not text:
        return ""
    try:
        parts = urlsplit(text)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        has_port, parts = False, urlsplit("")
    is_plain = text.isascii() and text.isprintable() and " " not in text
    if not (is_plain and has_port and parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc):
        raise ValueError(
            "the environment variable GRAFT_WEBHOOK is not an address that can be posted to: expected http:// or https://,"
            " a host and no user name, such as https://hooks.example.org/graft. Mend it, or unset it to send nothing."
        )
    return text


def post(message: Mapping[str, Any]) -> str:
    """Posts a JSON object to the owner's address, if there is one. Returns what went wrong, without the address; ""
    when it arrived or nothing was to be sent. Takes at most `SECONDS`.
    """
    to = address()
    if not to:
        return ""
    problems = [f"no answer within {SECONDS:g} seconds"]
    body = text_of(message).encode()

    def send() -> None:
        problems[0] = _send(to, body)

    thread = threading.Thread(target=send, name="graft-webhook", daemon=True)
    thread.start()
    thread.join(SECONDS)
    problem = problems[0]
    return f"the webhook (GRAFT_WEBHOOK) was not reached: {problem}" if problem else ""


def _send(to: str, body: bytes) -> str:
    request = urllib.request.Request(to, body, {"Content-Type": "application/json", "User-Agent": "Graft"})
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        is_elsewhere = 300 <= error.code < 400
        return f"it answered {error.code}" + (", another address, which is not followed" if is_elsewhere else "")
    except urllib.error.URLError as error:
        return str(error.reason)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
