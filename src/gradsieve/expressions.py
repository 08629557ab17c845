"""What a user names with options: `micro`, `micro(control=paper)`, `mlp(hidden=3310)`."""

from __future__ import annotations

import ast
from typing import Any, NamedTuple


class Expression(NamedTuple):
    """A name and its options."""

    name: str
    options: dict[str, Any]


class ExpressionError(ValueError):
    """A text that is no expression; whoever asked for one says what it could have been."""


def parse(text: str) -> Expression:
    """Name and options of an expression; bare words are strings.

    >>> parse("micro(control=paper, density=0.1)")
    Expression(name='micro', options={'control': 'paper', 'density': 0.1})
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ExpressionError(text) from error
    if isinstance(tree, ast.Name):
        return Expression(tree.id, {})
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.args:
        raise ExpressionError(text)
    options: dict[str, Any] = {}
    for keyword in tree.keywords:
        if keyword.arg is None or keyword.arg in options:
            raise ExpressionError(text)
        options[keyword.arg] = _literal(keyword.value, text)
    return Expression(tree.func.id, options)


def written(name: str, options: dict[str, Any]) -> str:
    """The inverse.

    >>> written("powersgd", {"rank": 4})
    'powersgd(rank=4)'
    """
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})" if options else name


def _literal(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name):
        return node.id
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ExpressionError(text) from error
