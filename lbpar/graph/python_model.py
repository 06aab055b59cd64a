"""Networks that a function of the user's builds: ``model: {python: "package.module:function"}``."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from lbpar.config.report import nearest
from lbpar.errors import ConfigError, GraphError, LbparError
from lbpar.graph.graph import Graph


def python_graph(path: str, **options: Any) -> Graph:
    """Import a function, call it with the options and return its graph.

    Parameters
    ----------
    path : str
        ``"package.module:function"``; modules in the current directory are found too.
    **options
        Keyword arguments of the function.

    Raises
    ------
    ConfigError
        The module cannot be imported, has no such function, or the function does not take these options.
    GraphError
        The function failed (the message says where) or returned something else than a Graph.
    """
    where = f"model.python: {path}"
    function = _find(path, where)
    _check_options(function, options, where)
    try:
        graph = function(**options)
    except LbparError as error:
        raise type(error)(f"{where}: {error}") from error
    except Exception as error:
        raise GraphError(f"{where}: the function failed with {_describe(error)}.") from error
    if not isinstance(graph, Graph):
        raise GraphError(
            f"{where}: the function returned {type(graph).__name__}, expected a Graph; end it with `return g.build(x)`."
        )
    return graph


def _find(path: str, where: str) -> Callable[..., Any]:
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{where}: expected package.module:function.")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # stays: the module may import its neighbours later, when the function is called
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(
                f"{where}: there is no module {error.name}; it is looked for in the current directory ({here}) and "
                "among the installed packages. Check the spelling or set PYTHONPATH."
            ) from None
        raise ConfigError(f"{where}: importing {module_name} failed with {_describe(error)}.") from error
    except Exception as error:
        raise ConfigError(f"{where}: importing {module_name} failed with {_describe(error)}.") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [n for n in dir(found) if callable(getattr(found, n)) and not n.startswith("_")]
            raise ConfigError(
                f"{where}: there is no {part} in {found.__name__}; {nearest(part, known)}".rstrip("; ") + "."
            )
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{where}: {attribute} is of type {type(found).__name__}, expected a function.")
    return found  # type: ignore[no-any-return]


def _check_options(function: Callable[..., Any], options: dict[str, Any], where: str) -> None:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return  # some built-in callables have no signature; calling them will tell
    kinds = {p.kind for p in parameters.values()}
    named = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [n for n, p in parameters.items() if n in named and p.default is p.empty]
    unknown = [n for n in options if n not in named and inspect.Parameter.VAR_KEYWORD not in kinds]
    if unknown:
        known = f"Known: {', '.join(named)}" if named else "The function takes no options"
        raise ConfigError(f"{where}: unknown option '{unknown[0]}'; {nearest(unknown[0], named)}{known}.")
    missing = [n for n in required if n not in options]
    if missing:
        raise ConfigError(f"{where}: the option '{missing[0]}' is missing; the function requires it.")


def _describe(error: Exception) -> str:
    """Kind, message and place of an exception; command lines print no traceback, so the place matters."""
    kind = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return kind  # names file and line itself
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{kind} ({last.filename}:{last.lineno})"
