"""Update rules of float32 blocks by the compiled passes (``kernels/updates.c``), to the last bit as NumPy's."""

from __future__ import annotations

from collections.abc import Sequence

from lbpar.engine.native.passes import Native, is_dense
from lbpar.engine.numpy_engine import NumpyEngine
from lbpar.engine.rules import Blocks


class CompiledUpdates(NumpyEngine):
    """The part of an engine that applies update rules.

    Attributes
    ----------
    native : Native or None
        None leaves everything to NumPy.
    """

    native: Native | None = None

    def sgd(
        self, blocks: Blocks, momentum: float, nesterov: bool, decays: Sequence[float], rates: Sequence[float]
    ) -> None:
        for block, decay, rate in zip(blocks, decays, rates, strict=True):
            if self.native is not None and is_dense(*block):
                self.native.sgd(block[0], block[1], block[2:], momentum, nesterov, decay, rate)
            else:
                super().sgd([block], momentum, nesterov, [decay], [rate])

    def adam(
        self,
        blocks: Blocks,
        betas: tuple[float, float],
        eps: float,
        keeps: Sequence[float],
        decays: Sequence[float],
        rates: Sequence[float],
    ) -> None:
        for block, keep, decay, rate in zip(blocks, keeps, decays, rates, strict=True):
            if self.native is not None and is_dense(*block):
                p, g, m, v = block
                self.native.adam(p, g, m, v, betas, keep, decay, eps, rate)
            else:
                super().adam([block], betas, eps, [keep], [decay], [rate])
