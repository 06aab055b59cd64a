"""`machine: auto` on several ranks."""

from __future__ import annotations

import pytest

from lbpar.calibrate import machine
from lbpar.calibrate.links import MOVES
from lbpar.config.engine import EngineConfig
from lbpar.threads import node_cores
from lbpar.transport.launch import connect
from tests.util.mpi import collective_assert


@pytest.mark.mpi(min_size=2)
def test_all_ranks_measure_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_, last = machine.samples_by_turns()  # a convolution, and a kernel that is no matrix product
    monkeypatch.setattr(machine, "ROUNDS", 2)
    monkeypatch.setattr(machine, "samples_by_turns", lambda: [first, last])
    transport = connect()
    monkeypatch.setattr(machine, "timestamp", lambda: f"by the clock of rank {transport.rank}")
    found = machine.machine_of("auto", EngineConfig(name="numpy", threads=1), transport)
    same = len(set(transport.allgather_obj(found.file.model_dump_json()))) == 1
    (level,) = found.file.levels
    shared = transport.size > min(transport.allgather_obj(node_cores()))
    counted = transport.counter.total().messages
    with collective_assert(transport):
        assert same, "ranks measured different machines"
        assert 0 < level.alpha < 1 and level.bandwidth > 1e6
        sizes = {transport.grid.ways(transport.grid.axes[: i + 1]) for i in range(len(transport.grid.axes))}
        assert {(m.kind, m.ways) for m in level.moves} == {(kind, ways) for kind in MOVES for ways in sizes}
        assert found.file.notes["measured"]["ranks"] == transport.size
        assert (found.file.cores is not None) == shared
        assert counted == 0
    transport.close()
