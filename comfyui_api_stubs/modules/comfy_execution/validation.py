"""Whether a value of one socket type may go into a socket of another."""

from __future__ import annotations

from typing import Any


def validate_node_input(received_type: Any, input_type: Any, strict: bool = False) -> bool:
    """Types are names, or several joined by commas, or "*" for any; one in common is enough, `strict` asks that all
    received ones fit.

    A type class whose `!=` says that it equals everything is honoured; a list of options fits a combo.
    """
    if not received_type != input_type:  # noqa: SIM202  (packs override __ne__, not __eq__)
        return True
    if isinstance(received_type, list) and input_type == "COMBO":
        return True
    if not isinstance(received_type, str) or not isinstance(input_type, str):
        return False
    received, expected = ({name.strip() for name in kinds.split(",")} for kinds in (received_type, input_type))
    if "*" in received | expected:
        return True
    return received <= expected if strict else bool(received & expected)
