"""The changes that Cosmic Ray makes: its own, of each operator one, and a statement left out.

Its binary operators make eleven changes of every sum, most of which are a TypeError at the first call.
"""

from __future__ import annotations

from collections.abc import Iterator

from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import Keyword
from parso.tree import NodeOrLeaf

LOGS = {"print", "debug", "info", "warning", "error", "exception"}
ASSIGNED = {"trailer", "atom_expr", "power"}  # a.b, a[0]: what a name alone means is seen where it is used
OWN = (
    *(f"ReplaceComparisonOperator_{pair}" for pair in ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt")),
    *(f"ReplaceComparisonOperator_{pair}" for pair in ("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")),
    *(f"ReplaceBinaryOperator_{pair}" for pair in ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "Mod_Mul", "Pow_Mul")),
    *(f"ReplaceBinaryOperator_{pair}" for pair in ("FloorDiv_Div", "BitOr_BitAnd", "BitAnd_BitOr")),
    *(f"ReplaceUnaryOperator_{name}" for name in ("Delete_Not", "Delete_USub")),
    *("AddNot", "ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"),
    *("ExceptionReplacer", "RemoveDecorator", "NumberReplacer"),
)


class LeaveOutStatement(Operator):
    """Puts pass in place of a call, an assignment to a part of something, a del, a raise or a return."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        if node.type == "simple_stmt" and _acts(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        statement = node.children[0]
        node.children[0] = Keyword("pass", statement.start_pos, statement.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example("f(a)\n", "pass\n"),
            Example("a.b = c\n", "pass\n"),
            Example("a += b\n", "pass\n"),
            Example("del a[0]\n", "pass\n"),
            Example("raise ValueError\n", "pass\n"),
            Example("def f():\n    return a\n", "def f():\n    pass\n"),
        )


def _acts(statement: NodeOrLeaf) -> bool:
    """Whether a statement does something that a test could miss; a log line, say, does not."""
    if statement.type in ("raise_stmt", "del_stmt", "return_stmt"):
        return True
    if statement.type == "expr_stmt":
        target, assigns = statement.children[:2]
        return assigns.type != "annassign" and (target.type in ASSIGNED or assigns.get_code().strip() != "=")
    if statement.type not in ("atom_expr", "power"):
        return False
    *_, called, arguments = statement.children
    return arguments.get_code().startswith("(") and called.get_last_leaf().get_code().strip() not in LOGS


class Provider:
    """Operators by name, as `cosmic_ray.plugins` keeps them."""

    def __iter__(self) -> Iterator[str]:
        return iter((*OWN, "LeaveOutStatement"))

    def __getitem__(self, name: str) -> type[Operator]:
        if name == "LeaveOutStatement":
            return LeaveOutStatement
        return OperatorProvider()[name]
