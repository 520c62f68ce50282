"""Whether another site's page made a browser send a request. A page can do that to any address that its reader can
reach: this machine, or one in the same network.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def refusal(headers: Mapping[str, str]) -> str:
    """Why a request with these headers is refused, empty for one of this server's own page or of a program.

    Browsers tell of another site in Sec-Fetch-Site, but only to HTTPS and this machine's own addresses. To all others
    Origin alone says it, with every request that is not a plain GET.
    """
    site = headers.get("Sec-Fetch-Site", "none")
    if site not in ("none", "same-origin"):
        return f"a {site} request"
    return origin_refusal(headers)


def origin_refusal(headers: Mapping[str, str]) -> str:
    """Why the Origin of a request is refused: it is not the address that Host names. Empty when it is, or when there is
    none. An Origin of "null" is that of a page without an address, such as a file or a sandboxed frame.
    """
    origin, host = headers.get("Origin"), headers.get("Host", "").lower()
    if origin is None:
        return ""
    try:
        parts = urlsplit(origin.lower())
    except ValueError:  # "http://[::1"
        return f"Origin {origin!r} is not an address"
    port = _DEFAULT_PORTS.get(parts.scheme)
    if port is None or parts.netloc.removesuffix(port) != host.removesuffix(port):
        return f"Origin {origin!r} is not this server ({host})"
    return ""
