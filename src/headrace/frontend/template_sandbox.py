"""A jinja2 environment for chat templates, which are programs by strangers: no way out, and no way to be huge or slow.

jinja2's sandbox closes the way to Python's internals and limits `range`. What it leaves open is closed here with one
`Budget` per rendering: every loop round, call, filter and operator that can grow a value is charged for what it makes
before it is made, where that can be known, and looks at the clock. Loops and `~` are reached by rewriting the parsed
template; the text between the tags of a loop is charged with each round.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARS = 1 << 25  # characters (or list items) that one rendering may make, in all
MAX_NUMBER = 100_000  # largest number a filter or method may be given: widths, counts, indents
MAX_BITS = 4096  # of an integer result
MAX_SECONDS = 2.0
# Filters that hand values on without turning them into text: their input may be any size that exists already.
_STRUCTURAL = frozenset(
    {
        "length", "count", "list", "first", "last", "map", "select", "reject", "selectattr", "rejectattr",
        "items", "dictsort", "default", "d", "sort", "unique", "groupby", "reverse", "attr", "sum",
        "min", "max", "batch", "slice", "random", "abs", "int", "float", "round",
    }
)  # fmt: skip


class Budget:
    """What is left of a rendering's allowance of characters and time."""

    def __init__(self) -> None:
        self.left = MAX_CHARS
        self.deadline = time.monotonic() + MAX_SECONDS

    def spend(self, size: int) -> None:
        """Charge `size` characters; SecurityError when the allowance or the time is used up."""
        self.left -= size + 1
        if self.left < 0:
            raise SecurityError(f"the chat template makes more than {MAX_CHARS} characters; refused")
        if time.monotonic() > self.deadline:
            raise SecurityError(f"the chat template runs longer than {MAX_SECONDS:g} s; refused")


BUDGET: ContextVar[Budget | None] = ContextVar("template_budget", default=None)


def _spend(size: int) -> None:
    budget = BUDGET.get()
    if budget is not None:  # None while a template is compiled
        budget.spend(size)


def _weight(value: Any, seen: dict[int, int] | None = None) -> int:
    """Characters of a value written out. Shared parts count each time they appear, but are visited once."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if not isinstance(value, (list, tuple, dict, set, frozenset)):
        return 8
    seen = {} if seen is None else seen
    if id(value) not in seen:
        seen[id(value)] = 0
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        seen[id(value)] = len(value) + sum(_weight(part, seen) for part in parts)
    return seen[id(value)]


def _refuse_large(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise SecurityError(f"the chat template asks for {value} of something; refused above {MAX_NUMBER}")


def _check_format(text: str) -> None:
    if re.search(r"\d{5}|%[^a-zA-Z%]*\*", text):
        raise SecurityError("the chat template formats with a width of 10,000 or more; refused")


def _check_braces(text: str) -> None:
    _check_format(text)
    if re.search(r"\{[^{}]*:[^{}]*\{", text.replace("{{", "").replace("}}", "")):
        raise SecurityError("the chat template takes a format's width from a value; refused")


class _Rounds:
    """An iterable that charges for each round of a loop over it; has a length if the original has one."""

    def __init__(self, items: Any, size: int):
        self._items, self._size = items, size

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            _spend(self._size)
            yield item


class _SizedRounds(_Rounds):
    def __len__(self) -> int:
        return len(self._items)


def _rounds(items: Any, size: int) -> Any:
    if not hasattr(items, "__iter__"):
        return items  # jinja2's own error is the right one
    return _SizedRounds(items, size) if hasattr(items, "__len__") else _Rounds(items, size)


def _concat(items: tuple[Any, ...]) -> str:
    _spend(sum(map(_weight, items)))
    return "".join(map(str, items))


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is charged for its input (when it becomes text) and its result, and refuses large numbers."""
    implicit = 1 if hasattr(function, "jinja_pass_arg") else 0  # context or environment comes first

    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        value, given = args[implicit : implicit + 1], args[implicit + 1 :]
        _refuse_large(given, kwargs)
        if value and name not in _STRUCTURAL:
            _spend(_weight(value[0]))
        if name == "replace" and value and len(given) > 1:
            text, new = str(value[0]), str(given[1])
            _spend(text.count(str(given[0])) * len(new))
        if name == "join" and value and isinstance(value[0], (list, tuple)):
            _spend(len(value[0]) * max(map(_weight, given), default=0))
        if name == "format" and value:
            _check_format(str(value[0]))
            _spend(sum(map(_weight, given)))
        result = function(*args, **kwargs)
        _spend(len(result) if isinstance(result, (str, list, tuple, dict)) else 0)
        return result

    return filtered


class _Generation(Extension):
    """`{% generation %}` marks what training should learn from; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _SafeNamespace(Namespace):
    """jinja2's namespace, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: str) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a chat template may not set the attribute {name!r}")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates with the blocks, filters and functions they expect (those of transformers)."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=_charge_output,
        )
        self.filters["tojson"] = _tojson
        for name, function in list(self.filters.items()):
            self.filters[name] = _guarded(name, function)
        self.filters["_rounds"], self.filters["_concat"] = _rounds, _concat
        del self.globals["lipsum"]
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            dict=lambda *args, **kwargs: dict(*args, **kwargs),
            namespace=_SafeNamespace,
        )

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _rewrite(tree)
        return tree

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call a template makes. Methods of strings are those that can make much out of little."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes, int, list)) and not isinstance(owner, bool):
            _refuse_large(args, kwargs)
            name = getattr(__obj, "__name__", "")
            if isinstance(owner, str):
                _check_method(owner, name, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        _spend(len(result) if isinstance(result, (str, bytes, list, tuple, dict)) else 0)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` behind the checks for width; None for anything else."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None
        text = value.__self__

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_braces(text)
            _spend(len(text) + text.count("{") * max(map(_weight, (*args, *kwargs.values())), default=0))
            return formatted(*args, **kwargs)

        return checked

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`*`, `**`, `+` and `%`, charged before they are carried out."""
        if operator == "*":
            for times, value in ((left, right), (right, left)):
                if isinstance(times, int) and not isinstance(value, (int, float)):
                    _spend(max(times, 0) * _weight(value))
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise SecurityError("the chat template computes a number of more than 1,000 digits; refused")
        if operator == "+" and not isinstance(left, (int, float)):
            _spend(_weight(left) + _weight(right))
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            _spend(len(left) + _weight(right))
        return super().call_binop(context, operator, left, right)


def _check_method(owner: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    size = len(owner) + sum(map(_weight, (*args, *kwargs.values())))
    if name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        size += owner.count(args[0]) * len(args[1])
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        size += len(args[0]) * len(owner)
    elif name == "expandtabs":
        size += owner.count("\t") * max((arg for arg in args if isinstance(arg, int)), default=8)
    elif name == "translate":
        size += len(owner) * max(map(_weight, args), default=0)
    _spend(size)


def _rewrite(node: nodes.Node) -> None:
    """Route the loops and `~` below `node` through the charged filters."""
    for child in node.iter_child_nodes():
        _rewrite(child)
    for field in node.fields:
        value = getattr(node, field)
        if isinstance(value, nodes.Concat):
            setattr(node, field, _charged(value))
        elif isinstance(value, list):
            setattr(node, field, [_charged(item) if isinstance(item, nodes.Concat) else item for item in value])
    if isinstance(node, nodes.For):
        size = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        call = nodes.Filter(node.iter, "_rounds", [nodes.Const(size)], [], None, None)
        call.set_lineno(node.lineno)
        call.set_environment(node.environment)  # type: ignore[arg-type]
        node.iter = call


def _charged(concat: nodes.Concat) -> nodes.Filter:
    items = nodes.Tuple(concat.nodes, "load").set_lineno(concat.lineno)
    call = nodes.Filter(items, "_concat", [], [], None, None)
    call.set_lineno(concat.lineno)
    call.set_environment(concat.environment)  # type: ignore[arg-type]
    return call


def _charge_output(value: Any) -> Any:
    _spend(_weight(value))
    return value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers' templates expect it: no HTML escaping, other scripts as they are."""
    if isinstance(indent, int):
        _spend(_weight(value) * max(indent, 0))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
