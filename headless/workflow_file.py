"""Reads workflow files."""

from __future__ import annotations

import json
from typing import Any

from ..storage.bounded_read import MB, read_bounded
from ..storage.regular_file import open_regular
from .embedded import Document, Problem, WorkflowError, workflow, workflow_inside

MOST_BYTES = 100 * MB


def read(path: str) -> Document:
    """Read a workflow file of either format, or the workflow inside of a picture or another file that ComfyUI saved.
    Raises WorkflowError if it is missing, not JSON, or not a workflow.
    """
    try:
        with workflow.no_garbage():
            data = _inside(path)
            if data is None:
                data = json.loads(read_bounded(path, MOST_BYTES).decode("utf-8-sig"))
    except OSError as error:
        raise WorkflowError([Problem(f"{path}: cannot be read ({error.strerror or error})")]) from error
    except UnicodeDecodeError as error:
        raise WorkflowError(
            [
                Problem(
                    f"{path}: not a text file in UTF-8; expected a workflow saved as JSON, or a file that ComfyUI saved"
                    f" with the workflow inside ({error.reason})"
                )
            ]
        ) from error
    except json.JSONDecodeError as error:
        raise WorkflowError(
            [Problem(f"{path}: not JSON (line {error.lineno}, column {error.colno}: {error.msg})")]
        ) from error
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or lists nested too deep
        raise WorkflowError([Problem(f"{path}: JSON that cannot be read ({error})")]) from error
    return workflow.parse(data, path)


def _inside(path: str) -> Any:
    """The workflow inside of a picture, a clip or a model; None for another file. Raises WorkflowError."""
    with open_regular(path) as file:
        try:
            return workflow_inside(file)
        except ValueError as error:
            raise WorkflowError([Problem(f"{path}: {error}")]) from error
