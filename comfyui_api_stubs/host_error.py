"""The error of a host that cannot be opened or used as asked."""


class HostError(Exception):
    """The requested host cannot be opened; the message says what is missing and what to do."""
