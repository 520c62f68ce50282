"""Small changes of Python source that a test should notice: a turned condition, another operator, number or name, a
statement left out.

Docstrings, annotations, decorators, texts (of errors, logs and tooltips) and code of other systems stay as they are.
"""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass, replace

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
# A comparison with one of these, changed, is the condition turned round.
TURNED = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
LOGS = {"print", "debug", "info", "warn", "warning", "error", "exception", "log"}
TEXTS = {"tooltip", "description", "display_name", "help", "metavar", "title", "hint"}
OTHER_SYSTEMS = {"win32", "nt", "darwin"}


@dataclass(frozen=True)
class Change:
    """`after` in place of `before`, which lies at bytes `start` to `end` of the source, from `line` on.

    `nth` counts the equal changes before it in the file: with the file, `before` and `after` it names a change, also
    when other lines of the file are written anew.
    """

    line: int
    start: int
    end: int
    before: str
    after: str
    nth: int = 0

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{_short(self.before)}  ->  {_short(self.after)}"


def _short(code: str) -> str:
    line = " ".join(code.split())
    if len(line) > 100:
        return f"{line[:97]}..."
    return line


def changes(source: bytes) -> list[Change]:
    """Every change of a file, in the order of its text."""
    collector = _Collector(source)
    collector.visit(ast.parse(source))
    found = []
    equal: Counter[tuple[str, str]] = Counter()
    for change in sorted(collector.found, key=lambda change: (change.start, change.end, change.after)):
        texts = (change.before, change.after)
        found.append(replace(change, nth=equal[texts]))
        equal[texts] += 1
    return found


def is_python(source: bytes) -> bool:
    try:
        compile(source, "changed", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


class _Collector(ast.NodeVisitor):
    """Walks a file and notes its changes."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.found: list[Change] = []
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def place(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """(first byte, byte behind the last) of a node."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.place(node)
        return self.source[start:end].decode()

    def add(self, node: ast.expr | ast.stmt, after: str) -> None:
        self.found.append(Change(node.lineno, *self.place(node), self.text(node), after))

    def add_node(self, node: ast.expr, changed: ast.expr) -> None:
        self.add(node, f"({ast.unparse(changed)})")

    def turn(self, condition: ast.expr) -> None:
        """A condition turned round, where no other change does that."""
        if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
            return
        if isinstance(condition, ast.Compare) and len(condition.ops) == 1 and isinstance(condition.ops[0], TURNED):
            return
        self.add(condition, f"(not ({self.text(condition)}))")

    def visit_all(self, nodes: list) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    # statements

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) or _is_log(node.value):
            return
        if isinstance(node.value, ast.Call):
            self.add(node, "pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add(node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None):
            return
        self.add(node, "return None")
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self.add(node, "pass")
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit_all([node.value])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add(node, "pass")
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self.add(node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.add(node, "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.add(node, "break")

    def visit_If(self, node: ast.If) -> None:
        words = {part.value for part in ast.walk(node.test) if isinstance(part, ast.Constant)}
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if words & OTHER_SYSTEMS:
            self.visit_all(node.orelse)
            return
        self.turn(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.turn(node.test)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.visit_all([*node.args.defaults, *node.args.kw_defaults, *node.body])

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.visit_all(node.body)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self.visit_all(node.body)

    # expressions

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.turn(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self.turn(condition)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for number, operator in enumerate(node.ops):
            operators = [*node.ops]
            operators[number] = COMPARISONS[type(operator)]()
            self.add_node(node, ast.Compare(node.left, operators, node.comparators))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        other = OPERATORS.get(type(node.op))
        if other is not None and not _is_text(node.left) and not _is_text(node.right):
            self.add_node(node, ast.BinOp(node.left, other(), node.right))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other: ast.boolop = ast.And()
        if isinstance(node.op, ast.And):
            other = ast.Or()
        self.add_node(node, ast.BoolOp(other, node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.Not, ast.USub)):
            self.add_node(node, node.operand)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        texts = [keyword.value for keyword in node.keywords if keyword.arg in TEXTS]
        keywords = [keyword.value for keyword in node.keywords]
        self.visit_all([node.func, *node.args, *(value for value in keywords if value not in texts)])

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A text with values in it stays."""

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit_all([*node.args.defaults, *node.args.kw_defaults, node.body])

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add(node, str(not value))
        elif isinstance(value, (int, float)):
            self.add(node, repr(value + 1))
        elif isinstance(value, str) and value and not any(map(str.isspace, value)):
            self.add(node, repr(f"XX{value}"))


def _is_log(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return getattr(node.func, "id", getattr(node.func, "attr", "")) in LOGS


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
