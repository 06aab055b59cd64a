"""Order a program for overlap and free its arrays: starts as early, waits as late as the data allow."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from lbpar.program.steps import Free, Program, Start, StartMany, Step, Sum, Update, Wait, reads, writes

BUCKET_BYTES = 4 << 20
"""In training, gradients are summed over ranks in messages of about this size: large enough that latency does not matter, small enough
that the first leave while the backward pass still computes."""


def finish(program: Program, *, keep: bool, overlap: bool, bucket_bytes: int = 0) -> Program:
    """Order the steps of a freshly lowered program and insert frees."""
    steps = list(program.steps)
    if overlap:
        steps = _merge_gradients(_hoist_starts(steps), bucket_bytes)
        delayed = program.plan.pipeline is not None and program.plan.pipeline.delayed
        awaited = set() if delayed else set(program.results.values())
        steps = _sink_waits(_merge_statistics(steps, program, bucket_bytes), awaited)
    steps = _donate(steps, program, keep)
    if not keep:
        steps = _free(steps, program)
    return replace(program, steps=tuple(steps))


def _hoist_starts(steps: list[Step]) -> list[Step]:
    """Move each start up to just behind the step that makes its array, within its phase; the order of starts is kept."""
    out: list[Step] = []
    for step in steps:
        if not isinstance(step, Start):
            out.append(step)
            continue
        at = len(out)
        while at > 0:
            before = out[at - 1]
            if (
                step.src in writes(before)
                or isinstance(before, (Start, StartMany, Wait))
                or getattr(before, "phase", None) != step.phase
            ):
                break
            at -= 1
        out.insert(at, step)
    return out


def _merge_gradients(steps: list[Step], limit: int) -> list[Step]:
    """Merge allreduces that only the update waits for, over the same axes, into messages of about ``limit`` bytes.

    A message starts when the last of its arrays is ready; but if the backward pass waits for other communication (statistics of
    norms over all ranks, halos), all start behind it: a few bytes that somebody waits for would queue behind megabytes that nobody
    needs yet. Sizes are judged by global extents, so that all ranks merge alike.
    """
    if limit <= 0:
        return steps
    last = {b for s in steps if isinstance(s, Update) for b in s.grads}
    last |= {b for s in steps if isinstance(s, Sum) and s.phase == "update" and s.dst in last for b in s.srcs}
    # What goes on to another stage is not waited for here.
    awaited = any(
        isinstance(s, Start)
        and s.phase == "backward"
        and s.dst not in last
        and s.move.axes
        and s.move.src.at == s.move.dst.at
        for s in steps
    )
    open_buckets: dict[tuple[object, ...], list[Start]] = {}
    out: list[Step] = []
    held: list[Step] = []

    def close(key: tuple[object, ...]) -> None:
        starts = tuple(open_buckets.pop(key))
        to = held if awaited else out
        to.append(StartMany(starts, starts[0].phase) if len(starts) > 1 else starts[0])
        to.extend(Wait(s.dst, s.phase) for s in starts)

    waits_moved: set[str] = set()
    for step in steps:
        if isinstance(step, Start) and step.move.kind == "allreduce" and step.dst in last:
            key: tuple[object, ...] = (step.move.axes, step.move.src.reduce, step.move.src.at)
            open_buckets.setdefault(key, []).append(step)
            waits_moved.add(step.dst)
            if sum(_bytes(s) for s in open_buckets[key]) >= limit:
                close(key)
            continue
        if isinstance(step, Wait) and step.dst in waits_moved:
            continue
        if getattr(step, "phase", None) == "update":
            for left in list(open_buckets):
                close(left)
            out.extend(held)
            held.clear()
        out.append(step)
    return out


def _merge_statistics(steps: list[Step], program: Program, limit: int) -> list[Step]:
    """Merge allreduces that are ready before the update (of statistics that norms kept apart until then), of one type
    and over the same axes, into one message in front of it; none of them merges where ``limit`` is 0."""
    update = [s for s in steps if getattr(s, "phase", None) == "update"]
    made = {b for s in update for b in writes(s)}
    groups: dict[tuple[object, ...], list[Start]] = {}
    for step in update:
        if isinstance(step, Start) and step.move.kind == "allreduce" and step.src not in made:
            key = (step.move.axes, step.move.src.reduce, step.move.src.at, program.buffers[step.src].dtype)
            groups.setdefault(key, []).append(step)
    merged = [StartMany(tuple(g), "update") for g in groups.values() if len(g) > 1 and limit > 0]
    if not merged:
        return steps
    gone = {s.dst for many in merged for s in many.starts}
    first = next(i for i, s in enumerate(steps) if getattr(s, "phase", None) == "update")
    rest = [s for s in steps[first:] if not (isinstance(s, (Start, Wait)) and s.dst in gone)]
    waits = [Wait(s.dst, s.phase) for many in merged for s in many.starts]
    return [*steps[:first], *merged, *waits, *rest]


def _bytes(start: Start) -> int:
    layout = start.move.src
    return 4 * prod(layout.shape) // layout.grid.ways(replace(layout, at=None).shard_axes)


def _sink_waits(steps: list[Step], results: set[str]) -> list[Step]:
    """Move each wait down to just before the first step that reads what arrives (or to the end).

    Results (the loss) arrive before the update, which must not run if the loss is not finite; but with delayed gradients, where stages would
    wait for the last one.
    """
    out: list[Step] = []
    pending: dict[str, Wait] = {}
    for step in steps:
        if isinstance(step, Wait):
            pending[step.dst] = step
            continue
        wanted = reads(step)
        if isinstance(step, Update):
            wanted = (*(b for b in pending if b in results), *wanted)
        for name in wanted:
            if name in pending:
                out.append(pending.pop(name))
        out.append(step)
    return out + list(pending.values())


def _last_use(steps: list[Step]) -> dict[str, int]:
    last: dict[str, int] = {}
    source: dict[str, str] = {}
    for i, step in enumerate(steps):
        for name in (*reads(step), *writes(step)):
            last[name] = i
        if isinstance(step, Start):
            # What goes to another stage is packed when it starts, and its sender does not wait.
            source[step.dst] = (
                step.dst if step.move.kind == "p2p" and step.move.src.at != step.move.dst.at else step.src
            )
        elif isinstance(step, StartMany):
            source.update({s.dst: s.src for s in step.starts})
        elif isinstance(step, Wait):
            last[source[step.dst]] = i  # the array must live until its move is done
    return last


def _donate(steps: list[Step], program: Program, keep: bool) -> list[Step]:
    if keep:
        return steps
    readers: dict[str, int] = {}
    for step in steps:
        for name in reads(step):
            readers[name] = readers.get(name, 0) + 1
    kept = set(program.params) | set(program.results.values())
    return [
        replace(s, donate=True) if isinstance(s, Start) and readers[s.src] == 1 and s.src not in kept else s
        for s in steps
    ]


def _free(steps: list[Step], program: Program) -> list[Step]:
    last = _last_use(steps)
    kept = set(program.params) | set(program.results.values())
    at: dict[int, list[str]] = {}
    for name, i in last.items():
        if name not in kept:
            at.setdefault(i, []).append(name)
    out: list[Step] = []
    for i, step in enumerate(steps):
        out.append(step)
        if i in at:
            out.append(Free(tuple(at[i])))
    return out
