"""Of many ranks one prints usage, help and mistakes; all end with the same status."""

from __future__ import annotations

import pytest

from lbpar.launcher import ALONE
from lbpar.transport.arguments import Parser


@pytest.mark.parametrize(("rank", "speaks"), [(0, True), (1, False)])
@pytest.mark.parametrize(("argument", "status"), [("--wrong", 2), ("--help", 0)])
def test_only_rank_0_speaks(
    rank: int,
    speaks: bool,
    argument: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv(ALONE, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
    with pytest.raises(SystemExit) as ended:
        Parser(prog="lbpar test").parse_args([argument])
    said = "".join(capsys.readouterr())
    assert ended.value.code == status
    assert ("usage: lbpar test" in said) is speaks and bool(said) is speaks
    assert ("--wrong" in said) is (speaks and status == 2)
