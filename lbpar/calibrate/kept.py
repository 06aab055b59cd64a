"""Parts of a calibration, kept beside the machine file until that is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lbpar.calibrate.links import Timed
from lbpar.calibrate.machine import Kernels, Parts
from lbpar.calibrate.trust import Load, Trust
from lbpar.config.machine_file import ComputeConfig, LevelConfig


class Kept(Parts):
    """Parts in a file. Only rank 0 has one; the others are given no path.

    Parameters
    ----------
    path : Path or None
    asked : mapping
        What is measured, as plain data: parts of something else are left alone.
    """

    def __init__(self, path: Path | None, asked: Mapping[str, Any]) -> None:
        self.path, self._asked = path, json.loads(json.dumps(asked))
        self._parts: dict[str, Any] = {}
        if path is not None:
            with suppress(OSError, ValueError):
                found = json.loads(path.read_text(encoding="utf-8"))
                if found["asked"] == self._asked:
                    self._parts = found["parts"]

    @property
    def any(self) -> bool:
        """Whether a part is kept."""
        return bool(self._parts)

    def find(self, name: str) -> Any:
        part = self._parts.get(name)
        if part is None:
            return None
        if name == "kernels":
            return Kernels(
                ComputeConfig.model_validate(part["compute"]), [Load(**x) for x in part["loads"]], part["spread"]
            )
        moves = [Timed(**{**t, "terms": tuple(t["terms"])}) for t in part["moves"]]
        return tuple(LevelConfig.model_validate(x) for x in part["levels"]), moves

    def keep(self, name: str, part: Any, trust: Trust) -> None:
        if self.path is None or trust.doubts():
            return
        if isinstance(part, Kernels):
            compute, loads = part.compute.model_dump(mode="json"), [asdict(x) for x in part.loads]
            self._parts[name] = {"compute": compute, "loads": loads, "spread": part.spread}
        else:
            levels, moves = part
            self._parts[name] = {
                "levels": [x.model_dump(mode="json", exclude_none=True) for x in levels],
                "moves": [asdict(t) for t in moves],
            }
        self.path.write_text(json.dumps({"asked": self._asked, "parts": self._parts}), encoding="utf-8")

    def drop(self) -> None:
        """Remove the file: what it was for is written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
