"""Read YAML as people mean it: duplicate keys are refused, ``5e-4`` is a number, ``no`` and ``on`` are words.

PyYAML follows YAML 1.1; the resolvers here are those of YAML 1.2's core schema (https://yaml.org/spec/1.2.2/#103-core-schema).
"""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from lbpar.config.paths import as_path
from lbpar.errors import ConfigError
from lbpar.text import shorten

MOST_BYTES = 16_000_000
MOST_ENTRIES = 1_000_000


class _Loader(yaml.SafeLoader):
    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _check_size(node)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, (str, int, float, bool, type(None))):
                raise _Refused(line, f"a field name may not be {shorten(key)}")
            if key in seen:
                raise _Refused(line, f"field {key!r} is given twice (first on line {seen[key]}); keep one")
            seen[key] = line
        return super().construct_mapping(node, deep)


class _Refused(Exception):
    def __init__(self, line: int, text: str) -> None:
        super().__init__(f"line {line}: {text}")


_FLOAT = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")
_BOOL = re.compile("^(true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^[-+]?[0-9]+$|^0x[0-9a-fA-F]+$")
_Loader.yaml_implicit_resolvers = {}  # those of YAML 1.1 are left behind
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^(~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile("^<<$"), ["<"])


def _int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, 16) if text.startswith("0x") else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _int)


def parse_yaml(text: str, source: str) -> Any:
    """Parse one YAML document.

    Raises
    ------
    ConfigError
        Syntax error or duplicate key, with the line.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        fault = f"{where}not valid YAML: {e.problem or e.context}"
    except _Refused as e:
        fault = str(e)
    except RecursionError:
        fault = "not valid YAML: nested too deeply"
    except (yaml.YAMLError, ValueError, OverflowError) as e:
        fault = f"not valid YAML: {' '.join(str(e).split())}"
    raise ConfigError(f"{source}: {fault}.")


def _check_size(root: yaml.Node) -> None:
    """Refuse aliases that make a small text stand for very many entries, or for something without an end.

    An alias is the same node once more: what is counted is the tree that the nodes stand for, each node once.
    """
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if (known := sizes.get(id(node))) is not None:
            if not known:
                raise _Refused(node.start_mark.line + 1, "an alias may not stand for what it is part of")
            return known
        sizes[id(node)] = 0  # while it is counted
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        flat = chain.from_iterable(parts) if isinstance(node, yaml.MappingNode) else parts
        sizes[id(node)] = total = 1 + sum(map(size, flat))
        if total > MOST_ENTRIES:
            raise _Refused(
                node.start_mark.line + 1,
                f"this holds more than {MOST_ENTRIES} entries, aliases written out; expected fewer",
            )
        return total

    size(root)


def read_yaml(path: str | Path, what: str) -> Any:
    """Read and parse a YAML (or JSON) file; ``what`` names its role in messages, as in ``run file``.

    Raises
    ------
    ConfigError
        Missing or unreadable file, or what `parse_yaml` refuses.
    """
    path = as_path(path)
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such {what}; give the path of an existing YAML file.") from None
    except (OSError, ValueError) as e:  # ValueError: a path that cannot be one
        reason = e.strerror if isinstance(e, OSError) else e
        raise ConfigError(f"{path}: cannot read this {what}: {reason}.") from None
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{path}: this {what} is larger than {MOST_BYTES} bytes; is it another file?")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: cannot read this {what}: it is not text in UTF-8.") from None
    return parse_yaml(text, str(path))


def dump_yaml(data: Any) -> str:
    """Write plain data as YAML text that `parse_yaml` reads back; short lists stay on one line."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None)


class _Dumper(yaml.SafeDumper):
    """Quotes what the loader above would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# A text such as "5e-4" is a number to the loader above; the dumper must know that to quote it.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
