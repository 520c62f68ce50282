"""What you get for putting something on a model: a handle that takes it off again."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Handle:
    """Takes one thing off a model; as a context, at its end. Handles may leave in any order."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave: Callable[[], None] | None = leave

    def leave(self) -> None:
        """Take it off; does nothing the second time."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
