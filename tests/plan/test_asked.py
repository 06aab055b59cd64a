"""What run files ask of stages."""

from __future__ import annotations

import pytest

from lbpar.config.parallel import ParallelConfig
from lbpar.errors import PlanError
from lbpar.models.registry import build_model
from lbpar.plan.asked import check_layer, check_stages, micro_batches, stages_each


def test_defaults_are_four_micro_batches_per_stage_and_two_stages_at_a_place() -> None:
    assert [micro_batches(ParallelConfig(stages=n)) for n in (1, 2, 4)] == [1, 8, 16]
    assert stages_each(ParallelConfig(stages=2)) == 1
    assert stages_each(ParallelConfig(stages=2, schedule="interleaved")) == 2
    assert stages_each(ParallelConfig(stages=2, schedule="interleaved", interleave=3)) == 3
    assert check_stages(ParallelConfig(stages=2), 20, 4) == (3, 2)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="got 3, which does not divide 4 processes"):
        check_stages(ParallelConfig(stages=3), 8, 4)
    with pytest.raises(PlanError, match="9 parts of 8 samples"):
        check_stages(ParallelConfig(micro_batches=9), 8, 4)
    with pytest.raises(PlanError, match="no layer 'cnv1'.*conv1"):
        check_layer("cnv1", build_model("lenet"))
