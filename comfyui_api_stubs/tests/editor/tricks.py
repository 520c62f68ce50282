"""Names that mean another place than a file in the folder they are asked for in, and something for them to steal."""

import itertools
import os
from pathlib import Path
from urllib.parse import quote

SECRET = b"nobody may read this"
UPS = ("..", "../..", "../../..", "../../../../../../../..")
PREY = ("secret.txt", "etc/passwd", "comfy.settings.json", "windows/win.ini")
SLASHES = ("\\", "\u2215", "\u2044", "\uff0f", "\uff3c", "\u29f8", "\u2216", "%2f", "%5c", "%252f", "%255c")
DOTS = (
    "\uff0e\uff0e",
    "\u2024\u2024",
    "\u2025",
    "%2e%2e",
    "%252e%252e",
    ".%2e",
    "%2e.",
    "..%00",
    "..%20",
    ".. ",
    " ..",
    "...",
    "....",
)


def tricks() -> list[str]:
    """Names that mean another place than a file in the folder they are asked for in, on one system or another; as text,
    not yet quoted.
    """
    found = [f"{up}/{prey}" for up, prey in itertools.product(UPS, PREY)]
    found += [f"{up}{slash}{prey}".replace("/", slash) for up in UPS[:3] for slash in SLASHES for prey in PREY[:2]]
    found += [f"{dots}/{prey}" for dots in DOTS for prey in PREY[:2]]
    found += [f"{dots}/{dots}/{dots}/{prey}" for dots in DOTS for prey in PREY[1:2]]
    found += [f"folder/{up}/{prey}" for up in UPS[1:] for prey in PREY[:2]]
    found += [f"./{up}/{prey}" for up in UPS[:3] for prey in PREY[:2]]
    found += [
        "/etc/passwd",
        "//etc/passwd",
        "///etc/passwd",
        "/./etc/passwd",
        "/proc/self/environ",
        "/dev/null",
        "~/secret.txt",
        "~x/y",
    ]
    found += [
        "C:/windows/win.ini",
        "C:\\windows\\win.ini",
        "C:windows.ini",
        "c:",
        "\\windows\\win.ini",
        "\\\\server\\share\\x.png",
    ]
    found += [
        "//server/share/x.png",
        "\\\\?\\C:\\windows\\win.ini",
        "\\\\.\\pipe\\x",
        "\\\\.\\PhysicalDrive0",
        "//?/C:/x",
        "/??/C:/x",
    ]
    found += [
        "file:///etc/passwd",
        "http://example.org/x.png",
        "file.png:stream",
        "file.png::$DATA",
        ":$DATA",
        "x.png:Zone.Identifier",
    ]
    found += [
        f"{device}{end}"
        for device in ("con", "NUL", "aux", "PRN", "com1", "LPT9", "CONIN$")
        for end in ("", ".png", "/x.png")
    ]
    found += [f"a{chr(code)}b.png" for code in (0, 1, 7, 9, 10, 13, 27, 31, 127)] + [
        "..\0/x",
        "x.png\0.txt",
        "../secret.txt\0.png",
    ]
    found += [
        "a\u202egnp.exe",
        "\u2066x",
        "a\u200b.png",
        "\ufeffx.png",
        "\u2028x.png",
        "..\u200b/secret.txt",
        "\ufffd.png",
    ]
    found += [
        "secret.txt.",
        "secret.txt ",
        "secret.txt. .",
        "folder./x.png",
        "folder /x.png",
        "x" * 300,
        "y/" + "x" * 256 + ".png",
    ]
    found += [
        "link_to_secret.txt",
        "link_to_folder/secret.txt",
        "link_to_folder",
        "a/../link_to_secret.txt",
        "link_to_root/etc/passwd",
    ]
    found += [f"{'a/' * depth}{'../' * (depth + 3)}etc/passwd" for depth in (1, 2, 5, 20)]
    found += [
        "..;/secret.txt",
        "..//secret.txt",
        "..///..//etc//passwd",
        "....//....//etc/passwd",
        "..././..././etc/passwd",
        "..\\/x",
    ]
    found += [
        "%c0%ae%c0%ae/secret.txt",
        "%c0%af..%c0%afetc",
        "%u002e%u002e/x",
        "%%32%65%%32%65/x",
        "..%c0%afetc/passwd",
        "%ff%fe/x",
    ]
    return list(dict.fromkeys(found))


TRICKS = tricks()
CLIMBS = [trick for trick in TRICKS if ".." in trick.split("/")]
# (method, target with {} for the trick, as part of the path or of the query)


def set_trap(server):
    """Put something to steal beside a server's folders, and links to it inside them. Returns `everything` there."""
    (server.place / "secret.txt").write_bytes(SECRET)
    prey = server.place / "elsewhere"
    prey.mkdir()
    (prey / "secret.txt").write_bytes(SECRET)
    for folder in ("input", "output", "temp", "user/default", "models/loras", "front"):
        place = server.place / folder
        (place / "folder").mkdir(exist_ok=True)
        for name, target in (
            ("link_to_secret.txt", prey / "secret.txt"),
            ("link_to_folder", prey),
            ("link_to_root", "/"),
        ):
            if not os.path.lexists(place / name) and (folder, target) != (
                "models/loras",
                "/",
            ):  # a host reads all that its lists lead to
                (place / name).symlink_to(target)
    server.ask("/userdata/mine.txt", "POST", b"mine")
    return everything(server.place)


def everything(place):
    """Every file below a folder (links not followed) but for the host's own, with what is in it."""
    found = {}
    for folder, _, names in os.walk(place):
        for name in names:
            path = os.path.join(folder, name)
            found[path] = os.readlink(path) if os.path.islink(path) else Path(path).read_bytes()
    return found


def spelled(trick: str) -> list[bytes]:
    """A trick as it goes over the wire: everything quoted, and where a client may send it so, with slashes and dots as
    they are.
    """
    once = quote(trick, safe="").encode()
    bare = quote(trick, safe="/.%").encode()
    usable = not trick.startswith("/") and ".." not in trick and bare != once and b"%" in bare
    return [once, bare] if usable else [once]


def not_refused(server, method, route):
    """The tricks in a route (whose {} they take) that are answered by anything but 4xx, with the answer."""
    targets = [target for trick in TRICKS for target in spelled(trick)]
    requests = [(method, route.encode().replace(b"{}", target)) for target in targets]
    answers = server.raws(requests, body=b"intruder" if method == "POST" else b"")
    found = [
        (target, answer)
        for (_, target), answer in zip(requests, answers, strict=True)
        if not 400 <= answer.status < 500
    ]
    assert not any(SECRET in answer.body or b"root:" in answer.body for answer in answers)
    return found
