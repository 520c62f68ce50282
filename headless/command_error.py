"""The error of what stands on the command line."""

from .embedded import WorkflowError


class CommandError(WorkflowError):
    """An option of the command, or a file that it names, is not valid."""
