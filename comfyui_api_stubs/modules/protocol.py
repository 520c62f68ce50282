"""The numbers of the binary messages that a server sends to its clients."""


class BinaryEventTypes:
    """First four bytes (big-endian) of a binary WebSocket message."""

    PREVIEW_IMAGE = 1
    UNENCODED_PREVIEW_IMAGE = 2
    TEXT = 3
    PREVIEW_IMAGE_WITH_METADATA = 4
