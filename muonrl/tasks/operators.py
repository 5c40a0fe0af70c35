"""Bug operators: single-line edits of one function that keep its formatting.

Every operator is closed under inversion: whatever edit it makes, the edit back is among the candidates of the edited
text. So the true repair of a bug made here is always a candidate edit of the buggy function. Edits replace a few
characters of one line; the syntax tree says where, and nothing is ever printed back from the tree.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from muonrl.errors import TaskError

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

COMPARE = {
    "<": ("<=", ">"),
    "<=": ("<", ">="),
    ">": (">=", "<"),
    ">=": (">", "<="),
    "==": ("!=",),
    "!=": ("==",),
    "in": ("not in",),
    "not in": ("in",),
    "is": ("is not",),
    "is not": ("is",),
}
BINARY = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "%", "%": "//"}
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
# Swapping the arguments of these changes nothing.
_SYMMETRIC_CALLS = ("min", "max")


@dataclass(frozen=True)
class Edit:
    """One edit: ``line`` (from 1) reads ``old`` before and ``new`` after, both stripped; ``text`` is the new source."""

    line: int
    old: str
    new: str
    operator: str
    text: str


@dataclass(frozen=True)
class _Change:
    """Replace columns ``start:end`` of ``line`` (from 1) by ``text``."""

    line: int
    start: int
    end: int
    text: str


class _Source:
    """The lines of one function's file with what the operators ask about them."""

    def __init__(self, text: str, function: FunctionNode) -> None:
        self.lines = text.split("\n")
        self.function = function
        self.loop_names = {
            node.target.id
            for node in _walk(function.body)
            if isinstance(node, ast.For | ast.comprehension)
            and isinstance(node.target, ast.Name)
            and isinstance(node.iter, ast.Call)
            and _call_name(node.iter) == "range"
        }

    def text(self, node: ast.expr) -> str:
        return self.lines[node.lineno - 1][node.col_offset : node.end_col_offset]

    def gap(self, left: ast.expr, right: ast.expr) -> tuple[int, int, int, str] | None:
        """Line, columns and text between two expressions; None when they are not on one line."""
        if left.end_lineno != right.lineno or left.end_col_offset is None:
            return None
        start, end = left.end_col_offset, right.col_offset
        return right.lineno, start, end, self.lines[right.lineno - 1][start:end]


def _walk(nodes: list[ast.stmt]) -> Iterator[ast.AST]:
    """All nodes in source order, except inside f-strings, where positions are unreliable before Python 3.12."""
    stack: list[ast.AST] = list(reversed(nodes))
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, ast.JoinedStr):
            stack += reversed(list(ast.iter_child_nodes(node)))


def _call_name(node: ast.expr) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _replace_between(src: _Source, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[_Change]:
    """Replace the operator ``old`` that stands between two expressions (parentheses may stand there too)."""
    if (gap := src.gap(left, right)) is None:
        return
    line, start, _, between = gap
    pattern = r"\s+".join(re.escape(word) for word in old.split())
    found = re.fullmatch(rf"([\s()]*)({pattern})([\s()]*)", between)
    if found:
        yield _Change(line, start + found.start(2), start + found.end(2), new)


_COMPARE_TEXT: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Is: "is",
    ast.IsNot: "is not",
}
_BINARY_TEXT: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
}


def _compare_flip(src: _Source, node: ast.AST) -> Iterator[_Change]:
    if not isinstance(node, ast.Compare):
        return
    sides = [node.left, *node.comparators]
    for op, (left, right) in zip(node.ops, itertools.pairwise(sides), strict=True):
        old = _COMPARE_TEXT[type(op)]
        for new in COMPARE[old]:
            yield from _replace_between(src, left, right, old, new)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _binop_swap(src: _Source, node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY_TEXT:
        if not (_is_text(node.left) or _is_text(node.right)):
            old = _BINARY_TEXT[type(node.op)]
            yield from _replace_between(src, node.left, node.right, old, BINARY[old])
    elif isinstance(node, ast.AugAssign) and type(node.op) in _BINARY_TEXT and not _is_text(node.value):
        old = _BINARY_TEXT[type(node.op)]
        yield from _replace_between(src, node.target, node.value, old + "=", BINARY[old] + "=")


def _and_or(src: _Source, node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.BoolOp):
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in itertools.pairwise(node.values):
            yield from _replace_between(src, left, right, old, new)


def _conditions(test: ast.expr) -> Iterator[ast.expr]:
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _conditions(value)
    else:
        yield test


_INVERTIBLE = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.BinOp)


def _if_invert(_: _Source, node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        tests = [node.test]
    elif isinstance(node, ast.comprehension):
        tests = node.ifs
    else:
        return
    for test in (part for whole in tests for part in _conditions(whole)):
        if isinstance(test, _INVERTIBLE):
            yield _Change(test.lineno, test.col_offset, test.col_offset, "not ")
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = test.operand
            if isinstance(inner, _INVERTIBLE) and inner.lineno == test.lineno:
                yield _Change(test.lineno, test.col_offset, inner.col_offset, "")


_NEIGHBOURS = {0: (1,), 1: (0, 2), 2: (1,)}


def _is_int(node: ast.AST, *values: int) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value in values


def _constant_step(_: _Source, node: ast.AST) -> Iterator[_Change]:
    """0 <-> 1 <-> 2, but never a `+ 0`, `* 0`, `// 0` or `-0`, which no one writes."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.Constant) and _is_int(child, 0, 1, 2)):
            continue
        operand = isinstance(node, ast.BinOp | ast.AugAssign | ast.UnaryOp)
        for value in _NEIGHBOURS[child.value]:  # type: ignore[index]
            if not (operand and 0 in (value, child.value)) and child.end_col_offset is not None:
                yield _Change(child.lineno, child.col_offset, child.end_col_offset, str(value))


def _is_step(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and _is_int(node.right, 1)


def _is_steppable(src: _Source, node: ast.expr, index: bool) -> bool:
    if isinstance(node, ast.BinOp):
        text = _is_text(node.left) or _is_text(node.right)
        return isinstance(node.op, _ARITHMETIC) and not text and not _is_step(node)
    if index:
        return isinstance(node, ast.Name) and node.id in src.loop_names
    return isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript)


def _bounds(node: ast.AST) -> Iterator[tuple[ast.expr, bool, str]]:
    """Places where one more or less is a likely slip: (expression, is it an index, the signs tried)."""
    if isinstance(node, ast.Call) and _call_name(node) == "range" and node.args:
        yield node.args[0 if len(node.args) == 1 else 1], False, "+-"
    elif isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice | ast.Tuple):
        yield node.slice, True, "+-"
    elif isinstance(node, ast.Slice):
        for bound in (node.lower, node.upper):
            if bound is not None:
                yield bound, False, "+-"
    elif isinstance(node, ast.Return) and node.value is not None:
        yield node.value, True, "+"


def _step_added_or_dropped(src: _Source, node: ast.AST) -> Iterator[_Change]:
    for expr, index, signs in _bounds(node):
        if expr.lineno != expr.end_lineno or expr.end_col_offset is None:
            continue
        if _is_steppable(src, expr, index):
            for sign in signs:
                yield _Change(expr.lineno, expr.end_col_offset, expr.end_col_offset, f" {sign} 1")
        elif isinstance(expr, ast.BinOp) and _is_step(expr) and _is_steppable(src, expr.left, index):
            sign = "+" if isinstance(expr.op, ast.Add) else "-"
            if (
                sign in signs
                and src.text(expr).endswith(f" {sign} 1")
                and expr.left.end_col_offset is not None
            ):
                yield _Change(expr.lineno, expr.left.end_col_offset, expr.end_col_offset, "")


def _off_by_one(src: _Source, node: ast.AST) -> Iterator[_Change]:
    yield from _constant_step(src, node)
    yield from _step_added_or_dropped(src, node)


def _argument_swap(src: _Source, node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.Call) and _call_name(node) not in _SYMMETRIC_CALLS:
        items = node.args
    elif isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Load):
        items = node.elts
    else:
        return
    for left, right in itertools.pairwise(items):
        gap = src.gap(left, right)
        if gap is None or gap[3] != ", " or left.lineno != right.end_lineno or right.end_col_offset is None:
            continue
        first, second = src.text(left), src.text(right)
        if first != second and not any(
            isinstance(item, ast.Starred | ast.GeneratorExp) for item in (left, right)
        ):
            yield _Change(left.lineno, left.col_offset, right.end_col_offset, f"{second}, {first}")


def _dropped_return(_: _Source, node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.Return) and node.value is not None and node.value.lineno == node.lineno:
        if not _is_text(node.value):
            yield _Change(node.lineno, node.col_offset, node.value.col_offset, "")
    elif isinstance(node, ast.Expr):
        skipped = isinstance(node.value, ast.Yield | ast.YieldFrom | ast.Await) or _is_text(node.value)
        if not skipped:
            yield _Change(node.lineno, node.col_offset, node.col_offset, "return ")


OPERATORS: dict[str, Callable[[_Source, ast.AST], Iterator[_Change]]] = {
    "compare_flip": _compare_flip,
    "binop_swap": _binop_swap,
    "and_or": _and_or,
    "if_invert": _if_invert,
    "off_by_one": _off_by_one,
    "argument_swap": _argument_swap,
    "dropped_return": _dropped_return,
}


def functions(source: str) -> dict[str, FunctionNode]:
    """The module-level functions and the methods (``Class.method``) of ``source`` by name, in source order."""
    found: dict[str, FunctionNode] = {}
    for node in ast.parse(source).body:
        if isinstance(node, FunctionNode):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, FunctionNode):
                    found[f"{node.name}.{member.name}"] = member
    return found


def _parses(text: str, function: FunctionNode) -> bool:
    """Whether ``function`` still parses in the edited ``text``; no edit moves a line."""
    lines = text.split("\n")[function.lineno - 1 : function.end_lineno]
    indented = function.col_offset > 0
    try:
        ast.parse("\n".join(["class _:", *lines] if indented else lines))
    except SyntaxError:
        return False
    return True


def candidate_edits(source: str, function: str) -> list[Edit]:
    """All single-line operator edits inside the body of ``function``, in source order, each new text once.

    Raises TaskError when ``source`` has no such function or does not parse.
    """
    try:
        node = functions(source).get(function)
    except SyntaxError as error:
        raise TaskError(f"the source does not parse: {error.msg} (line {error.lineno})") from error
    if node is None:
        raise TaskError(f"the source has no function {function!r}")
    src = _Source(source, node)
    lines = source.split("\n")
    edits: dict[str, Edit] = {}
    for part in _walk(node.body):
        for operator, apply in OPERATORS.items():
            for change in apply(src, part):
                old = lines[change.line - 1]
                if not old.isascii():  # columns of the tree count bytes
                    continue
                new = old[: change.start] + change.text + old[change.end :]
                text = "\n".join([*lines[: change.line - 1], new, *lines[change.line :]])
                if text != source and text not in edits and _parses(text, node):
                    edits[text] = Edit(change.line, old.strip(), new.strip(), operator, text)
    return sorted(edits.values(), key=lambda edit: edit.line)


def is_unambiguous(edit: Edit) -> bool:
    """Whether the edited line, stripped, occurs exactly once in the new text, so that it names its place alone."""
    return bool(edit.new) and edit.text.count(edit.new) == 1
