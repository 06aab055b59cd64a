"""Fuse neighbouring local kernels, so that a value that only its neighbour reads is never stored.

    norm_apply + relu                             norm_relu_forward
    norm_apply + add + relu                       norm_add_relu_forward
    norm_sums + norm_moments                      norm_statistics
    [sum +] relu_backward + norm_backward_sums    norm_relu_backward_sums
    norm_backward_data [+ cut] + sum              norm_backward_data_add
    conv_forward + relu                           conv_relu_forward
    conv_backward_weights + bias_backward         conv_backward_weights_bias

Copies (``identity``) vanish: who reads the copy reads the original. Two kernels are fused only if nothing moves between
them: the one reads the very array that the other wrote, and nobody else does (a fused backward kernel still writes the masked
gradient, which others read).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from lbpar.program.plan import Plan
from lbpar.program.steps import Compute, Program, Step, Sum, reads, renamed, writes

#: The kernel that copies: whoever reads the copy reads the original instead.
COPY = "identity"
#: Fused only where no rank has a part of the channels: ranks with different channels share the bias, whose gradient must not
#: depend, in any bit, on their kernels.
WHOLE_CHANNELS = "conv_backward_weights_bias"


def fuse(program: Program) -> Program:
    """A program with fewer kernels that computes the same results; call it before steps are ordered."""
    steps, names = without_copies(list(program.steps))
    fused = _Fuser(steps, {names.get(b, b) for b in program.results.values()}, program.plan).run()
    results = {k: names.get(b, b) for k, b in program.results.items()}
    present = {b for s in fused for b in writes(s)} | set(program.params) | set(program.feeds)
    values = {v: names.get(b, b) for v, b in program.values.items()}
    return replace(
        program, steps=tuple(fused), results=results, values={v: b for v, b in values.items() if b in present}
    )


def without_copies(steps: Sequence[Step]) -> tuple[list[Step], dict[str, str]]:
    """Drop identity kernels; returns the steps and what each dropped buffer is called now."""
    names: dict[str, str] = {}
    out: list[Step] = []
    for step in steps:
        new = renamed(step, names)
        if isinstance(new, Compute) and new.kernel.name == COPY:
            names[new.writes[0]] = new.reads[0]
        else:
            out.append(new)
    return out, names


class _Fuser:
    def __init__(self, steps: list[Step], results: set[str], plan: Plan) -> None:
        self.steps: list[Step | None] = list(steps)
        self.plan = plan
        self.readers = Counter(b for s in steps for b in reads(s))
        self.readers.update(results)
        self.maker = {b: i for i, s in enumerate(steps) for b in writes(s)}

    def run(self) -> list[Step]:
        for i, step in enumerate(self.steps):
            if isinstance(step, Sum):
                self._add_to_norm(i, step)
            if not isinstance(step, Compute):
                continue
            name = step.kernel.name
            if name == "relu_forward":
                self._relu(i, step)
            elif name == "norm_backward_sums":
                self._norm_backward(i, step)
            elif name == "bias_backward":
                self._bias(i, step)
            elif name == "norm_moments":
                self._moments(i, step)
        return [s for s in self.steps if s is not None]

    def _made_by(self, buffer: str, kernel: str) -> tuple[int, Compute] | None:
        """The kernel of that name that wrote a buffer."""
        i = self.maker.get(buffer, -1)
        step = self.steps[i] if i >= 0 else None
        return (i, step) if isinstance(step, Compute) and step.kernel.name == kernel else None

    def _alone(self, buffer: str) -> bool:
        return self.readers[buffer] == 1

    def _replace(self, at: int, gone: Sequence[int], new: Compute) -> None:
        for i in gone:
            self.steps[i] = None
        self.steps[at] = new
        for b in new.writes:
            self.maker[b] = at

    def _relu(self, i: int, relu: Compute) -> None:
        x = relu.reads[0]
        if not self._alone(x):
            return
        if found := self._made_by(x, "norm_apply"):
            j, norm = found
            self._replace(i, [j], _merge("norm_relu_forward", norm, relu, norm.reads, relu.writes))
        elif found := self._made_by(x, "conv_forward"):
            j, conv = found
            self._replace(i, [j], _merge("conv_relu_forward", conv, relu, conv.reads, relu.writes))
        elif found := self._made_by(x, "add"):
            self._norm_add_relu(i, relu, *found)

    def _norm_add_relu(self, i: int, relu: Compute, j: int, add: Compute) -> None:
        if len(add.reads) != 2:
            return
        for which, other in ((0, 1), (1, 0)):
            found = self._made_by(add.reads[which], "norm_apply")
            if found and self._alone(add.reads[which]):
                k, norm = found
                operand = replace(add.kernel.reads[other], value="residual")
                merged = _merge("norm_add_relu_forward", norm, relu, (*norm.reads, add.reads[other]), relu.writes)
                kernel = replace(merged.kernel, reads=(*norm.kernel.reads, operand))
                self._replace(i, [j, k], replace(merged, kernel=kernel))
                return

    def _norm_backward(self, i: int, sums: Compute) -> None:
        x, dy, moments = sums.reads
        found = self._made_by(dy, "relu_backward")
        if not found:
            return
        j, relu = found
        if max(self.maker.get(x, -1), self.maker.get(moments, -1)) > j:
            return  # not there yet where the masked gradient is first needed
        y, upstream = relu.reads
        xk, dyk, mk = sums.kernel.reads
        gone, parts = self._addends(upstream)
        kernel = replace(
            sums.kernel,
            name="norm_relu_backward_sums",
            reads=(xk, replace(dyk, value="y"), dyk, mk, *(replace(dyk, value="dy2") for _ in parts[1:])),
            writes=(*sums.kernel.writes, *relu.kernel.writes),
            flops=sums.kernel.flops + relu.kernel.flops,
        )
        # At the place of the relu: whatever else reads the masked gradient comes after it.
        read = (x, y, parts[0], moments, *parts[1:])
        new = replace(sums, kernel=kernel, reads=read, writes=(*sums.writes, *relu.writes))
        self._replace(j, [i, *gone], new)

    def _addends(self, buffer: str) -> tuple[list[int], tuple[str, ...]]:
        """The two arrays of which a buffer is the sum that only one step reads, and the step to drop; else itself."""
        i = self.maker.get(buffer, -1)
        step = self.steps[i] if i >= 0 else None
        if isinstance(step, Sum) and len(step.srcs) == 2 and self._alone(buffer):
            return [i], step.srcs
        return [], (buffer,)

    def _add_to_norm(self, i: int, total: Sum) -> None:
        """A normalisation's dx is one of the two arrays added: it adds the other, or the first channels of what that is
        cut from."""
        if len(total.srcs) != 2:
            return
        for which, other in ((0, 1), (1, 0)):
            found = self._made_by(total.srcs[which], "norm_backward_data")
            if not found or len(found[1].writes) > 1 or not self._alone(total.srcs[which]):
                continue
            j, norm = found
            more, gone = total.srcs[other], [j]
            if (cut := self._made_by(more, "cut")) and self._first_channels(more, *cut):
                gone.append(cut[0])
                more = cut[1].reads[0]
            operand = replace(norm.kernel.writes[0], value="dy2")
            kernel = replace(norm.kernel, name="norm_backward_data_add", reads=(*norm.kernel.reads, operand))
            new = replace(norm, kernel=kernel, reads=(*norm.reads, more), writes=(total.dst,))
            self._replace(i, gone, new)
            return

    def _first_channels(self, buffer: str, i: int, cut: Compute) -> bool:
        """Whether a cut, read once, takes channels from the first on, on every rank."""
        window = cut.kernel.writes[0].dims[-1].window
        return self._alone(buffer) and not self.plan[cut.node].get("C") and not (window and window.pad)

    def _moments(self, i: int, moments: Compute) -> None:
        """Statistics that no other rank adds to are ready at once."""
        found = self._made_by(moments.reads[0], "norm_sums")
        if not found or found[1].reads[1:] != moments.reads[1:]:
            return
        j, sums = found
        kernel = replace(
            sums.kernel,
            name="norm_statistics",
            writes=(*sums.kernel.writes, *moments.kernel.writes),
            attrs=(*sums.kernel.attrs, *moments.kernel.attrs),
            flops=sums.kernel.flops + moments.kernel.flops,
        )
        self._replace(i, [j], replace(sums, kernel=kernel, writes=(*sums.writes, *moments.writes)))

    def _bias(self, i: int, bias: Compute) -> None:
        if self.plan[bias.node].get("C"):
            return  # see WHOLE_CHANNELS
        j = next((j for j in range(i - 1, -1, -1) if isinstance(self.steps[j], Compute)), -1)
        conv = self.steps[j]
        if (
            not isinstance(conv, Compute)
            or conv.kernel.name != "conv_backward_weights"
            or conv.reads[1] != bias.reads[0]
        ):
            return
        kernel = replace(conv.kernel, name=WHOLE_CHANNELS, writes=(*conv.kernel.writes, *bias.kernel.writes))
        self._replace(j, [i], replace(conv, kernel=kernel, writes=(*conv.writes, *bias.writes)))


def _merge(name: str, first: Compute, last: Compute, read: tuple[str, ...], written: tuple[str, ...]) -> Compute:
    """The first kernel's operands and attributes with the last one's result."""
    flops = first.kernel.flops + last.kernel.flops
    kernel = replace(first.kernel, name=name, writes=last.kernel.writes, flops=flops)
    return Compute(last.node, kernel, read, written, last.phase)
