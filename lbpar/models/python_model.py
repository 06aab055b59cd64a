"""Networks built by a function that the user wrote: ``model: {python: "mynet.py:build"}``, or ``"package.module:function"``.

A run file may come from a stranger, so a name in it reaches few functions: those of a file beside it, and those that their author
marked as a model (`model`). Whether Python may run at all is asked where a run file is read (`lbpar.config.run_file`).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from lbpar.errors import ConfigError, GraphError, LbparError
from lbpar.graph.graph import Graph
from lbpar.text import nearest

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__lbpar_model__"


def model(function: F) -> F:
    """Mark a function that returns a `Graph`: run files may name it as ``model: {python: "package.module:function"}``.

    Examples
    --------
    >>> @model
    ... def tiny(*, classes=10):
    ...     g = GraphBuilder((8, 8, 1))
    ...     return g.build(g.linear(g.flatten(g.input), classes))
    """
    setattr(function, _MARK, True)
    return function


def python_graph(python: str | Callable[..., Any], folder: Path = Path(), **options: Any) -> Graph:
    """Call a function that the user wrote with the options, and return its graph.

    Parameters
    ----------
    python : str or callable
        ``"file.py:function"``, a file in ``folder``; ``"package.module:function"``, which must be marked by `model` (modules in the
        current directory are found too); or the function itself.
    folder : Path
        Where the run file lies.
    **options
        Keyword arguments of the function.

    Raises
    ------
    ConfigError
        The module cannot be imported or has no such function, the function is not marked or does not take these options.
    GraphError
        The function failed (the message says where) or returned something else than a Graph.
    """
    where = f"model.python: {python if isinstance(python, str) else python.__qualname__}"
    function = _find(python, folder, where) if isinstance(python, str) else python
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


def _find(path: str, folder: Path, where: str) -> Callable[..., Any]:
    name, colon, attribute = path.partition(":")
    if not (name and colon and attribute):
        raise ConfigError(f"{where}: expected file.py:function or package.module:function.")
    file = name.endswith(".py")
    here = str((folder if file else Path()).absolute())
    if here not in sys.path:
        sys.path.insert(0, here)  # stays: the module may import its neighbours later, when the function is called
    if file and not Path(here, name).is_file():
        raise ConfigError(f"{where}: there is no file {name} beside the run file, in {here}; put it there.")
    try:
        found: Any = _load(Path(here, name)) if file else importlib.import_module(name)
    except Exception as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{name}.".startswith(f"{absent}."):
            raise ConfigError(
                f"{where}: there is no module {absent}; it is looked for in the current directory ({here}) and "
                "among the installed packages. Check the spelling or set PYTHONPATH."
            ) from None
        raise ConfigError(f"{where}: importing {name} failed with {_describe(error)}.") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [n for n in dir(found) if callable(getattr(found, n)) and not n.startswith("_")]
            raise ConfigError(
                f"{where}: there is no {part} in {found.__name__}; {nearest(part, known)}".rstrip("; ") + "."
            )
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{where}: {attribute} is of type {type(found).__name__}, expected a function.")
    if not file and getattr(found, _MARK, False) is not True:
        raise ConfigError(
            f"{where}: this function is not marked as a model, expected one that is; decorate it with @model (from "
            "lbpar.models.python_model import model), or put it in a file beside the run file and name it as file.py:function."
        )
    return found  # type: ignore[no-any-return]


def _load(path: Path) -> ModuleType:
    """The module in a file, whatever else is called as it; executed once, as an import is."""
    name = f"lbpar model {path}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


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
