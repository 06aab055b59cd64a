"""A job of ranks with devices in which rank 1 does not come to a sum: it ``raises``, ``aborts``, ``dies``, or ``stops`` for ever, also ``before`` groups are made."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

import numpy as np

from lbpar.config.engine import EngineConfig
from lbpar.engine.registry import get_engine
from lbpar.runtime.devices import over_devices
from lbpar.transport.launch import connect, run_main


def main(argv: Sequence[str] | None = None) -> int:
    transport = over_devices(connect(), EngineConfig(name="cupy", transport="nccl"))
    engine = get_engine("cupy")
    transport.attach(engine)
    if transport.rank == 1 and sys.argv[1] == "before":
        time.sleep(600)
    transport.prepare([transport.grid.axes])
    if transport.rank == 1:
        match sys.argv[1]:
            case "raises":
                raise RuntimeError("a bug on one rank")
            case "aborts":
                transport.abort("lbpar: that is enough")
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stops":
                time.sleep(600)
    total = transport.allreduce(engine.from_host(np.ones(4, np.float32)), transport.grid.axes, tag="a sum").wait()
    engine.to_host(total)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
