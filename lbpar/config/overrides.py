"""``--set field.path=value``: change single fields of a run file from the command line."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from lbpar.config.yaml_text import parse_yaml
from lbpar.errors import ConfigError
from lbpar.text import shorten

# A part is a name, or a quoted name where the name itself holds dots: parallel.layers."layer1.0.conv1".N
_PATH = re.compile(r"""(?:"[^"]+"|'[^']+'|[^.="']+)(?:\.(?:"[^"]+"|'[^']+'|[^.="']+))*""")
_PART = re.compile(r"""\.?(?:"([^"]+)"|'([^']+)'|([^.="']+))""")


def apply_overrides(data: Any, overrides: Sequence[str]) -> Any:
    """Return a copy of ``data`` with the given fields set.

    Parameters
    ----------
    data : Any
        Content of a run file.
    overrides : sequence of str
        ``path=value``. Parts of the path are separated by dots; a number picks an entry of a list; names that
        hold dots go in quotes. Missing blocks on the way are made. The value is YAML: ``3``, ``true``, ``[1, 2]``.

    Raises
    ------
    ConfigError
        No ``=``, a path through something that has no fields, an entry that a list does not have, invalid YAML.
    """
    if overrides:
        data = copy.deepcopy(data)
        data = {} if data is None else data
    for text in overrides:
        match = _PATH.match(text)
        if not match or not text[match.end() :].startswith("="):
            raise ConfigError(f"--set {text}: expected field.path=value, as in train.epochs=3.")
        parts = [a or b or c for a, b, c in _PART.findall(match[0])]
        value = parse_yaml(text[match.end() + 1 :], f"--set {text}")
        here = data
        for i, part in enumerate(parts):
            key: Any = part
            if isinstance(here, list):
                if not part.isdigit() or int(part) >= len(here):
                    raise ConfigError(
                        f"--set {text}: {'.'.join(parts[:i])} is a list of {len(here)}; got '{part}', "
                        f"expected an entry from 0 to {len(here) - 1}."
                    )
                key = int(part)
            elif not isinstance(here, dict):
                at = ".".join(parts[:i]) or "the file"
                raise ConfigError(f"--set {text}: {at} is {shorten(here)}, which has no field '{part}'.")
            if i == len(parts) - 1:
                here[key] = value
            elif isinstance(here, dict) and here.get(key) is None:
                here[key] = {}
            here = here[key]
    return data
