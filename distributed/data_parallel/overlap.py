"""Why gradients were still on their way when the backward was over: what a recorded step says, in a few plain lines.

    with ddp.recorder:
        ...                                     # one step
    print("\\n".join(overlap_report(ddp)))

A bucket travels from its launch on, and it is launched when its last gradient is final and all buckets before it are
launched. So what is late has one of these causes, each with another remedy:

    a gradient far behind its neighbours    a weight used in two places, or declared far from where it runs
    a bucket far behind those after it      the order of launches
    a large last bucket                     nothing is left to hide it behind
    tied weights of a pipeline              final only after the backward
    a slow link                             more bytes than the backward hides
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from distributed.data_parallel.ddp import DistributedDataParallel
from distributed.trace.recorder import size_text

LATE_SHARE = 0.05  # of the backward: less is not worth a line
MOST_LINES = 5
GAP_SHARE = 0.25  # of the backward, from the others' gradients to the last one of a bucket


@dataclass(frozen=True, eq=False)
class SeenBucket:
    """What was seen of a bucket. Times in seconds.

    Attributes:
        name: its number, and a parameter in it.
        num_bytes: that travel.
        ready: when the backward made each parameter's gradient final; those that it does not reach are ready before.
        launched, arrived: when it set out and was there.
        is_tied: it waits for what comes after the backward.
    """

    name: str
    num_bytes: int
    ready: Mapping[str, float]
    launched: float
    arrived: float
    is_tied: bool = False

    @cached_property
    def times(self) -> list[float]:
        return sorted(self.ready.values())

    @property
    def complete(self) -> float:
        """When its last gradient was final."""
        return self.times[-1] if self.times else -float("inf")

    @property
    def slowest(self) -> str:
        """The parameter whose gradient came last."""
        return max(self.ready, key=lambda name: self.ready[name])

    def __str__(self) -> str:
        return f"{self.name} ({size_text(self.num_bytes)})"


def overlap_report(ddp: DistributedDataParallel) -> list[str]:
    """Return what this rank's last recorded step says; nothing where no buckets were recorded.

    Not collective: each rank has its own.
    """
    notes, ready = ddp.recorder.notes, ddp.recorder.ready
    buckets = ddp.launched_buckets
    travels = sorted((note.start, note.end) for note in notes if note.category == "bucket")
    ends = [note.start for note in notes if (note.category, note.name) == ("wait", "buckets")]
    if len(travels) != len(buckets) or not ready or not ends:
        return []
    tied = set(getattr(ddp.model, "tied", ()))
    seen = [
        SeenBucket(
            bucket.name.partition(" ...")[0],
            sum(p.data.nbytes for p in bucket.range.params),
            {p.name: ready[p.name] for p in bucket.range.params if p.name in ready},
            *times,
            is_tied=not tied.isdisjoint(bucket.range.params),
        )
        for bucket, times in zip(buckets, travels, strict=True)
    ]
    lines = why_late(seen, min(ready.values()), ends[-1])
    if ddp.buckets.unused:
        num_bytes = sum(p.data.nbytes for p in ddp.params if p.name in ddp.buckets.unused)
        some = ", ".join(ddp.buckets.unused[:3]) + (" ..." if len(ddp.buckets.unused) > 3 else "")
        lines.append(f"no loss depends on {some}: {size_text(num_bytes)} of zeros travel for nothing; leave them out")
    return lines


def why_late(buckets: Sequence[SeenBucket], start: float, end: float) -> list[str]:
    """Say how much of the buckets' way lay after the backward, and why: at most `MOST_LINES` lines.

    Args:
        buckets: in the order of their launches, which is one after the other.
        start, end: of the backward: its first gradient, and when this rank began to wait.
    """
    seen = _Step(buckets, start, end)
    in_time = sum(bucket.arrived <= end for bucket in buckets)
    line = f"{in_time} of {len(buckets)} buckets were there when the backward ended"
    if seen.exposed < LATE_SHARE * seen.length:
        return [f"{line}, and all within {LATE_SHARE:.0%} of its time"]
    first = f"{line}; the last one came {_ms(seen.exposed)} later"
    causes = [*seen.tied_weights(), *seen.order(), *seen.stragglers()]
    return [first, *(causes + seen.end_of_the_way(has_cause=bool(causes)))[: MOST_LINES - 1]]


@dataclass(frozen=True)
class _Step:
    """A step whose buckets were late, and each cause that it may have had."""

    buckets: Sequence[SeenBucket]
    start: float
    end: float

    @property
    def length(self) -> float:
        return max(self.end - self.start, 1e-9)

    @property
    def exposed(self) -> float:
        return max(bucket.arrived for bucket in self.buckets) - self.end

    @property
    def plain(self) -> list[SeenBucket]:
        return [bucket for bucket in self.buckets if not bucket.is_tied]

    def tied_weights(self) -> Iterator[str]:
        tied = [bucket for bucket in self.buckets if bucket.is_tied]
        if any(bucket.arrived > self.end for bucket in tied):
            yield f"{_listed(tied)}: tied weights are final only when their stages have added them up, after it"

    def order(self) -> Iterator[str]:
        """Name buckets that were complete long before one that is launched first."""
        held: dict[SeenBucket, list[SeenBucket]] = {}
        for i, bucket in enumerate(self.plain):
            if i and bucket.launched - max(bucket.complete, self.start) > GAP_SHARE * self.length:
                held.setdefault(max(self.plain[:i], key=lambda before: before.complete), []).append(bucket)
        for culprit, behind in held.items():
            yield (
                f"{_listed(behind)} had to wait for {culprit}, which comes before and was complete at "
                f"{self._at(culprit.complete)}, by {culprit.slowest}: the order is learned in the first step"
            )

    def stragglers(self) -> Iterator[str]:
        """Name gradients that came long after the others of their bucket."""
        for bucket in self.plain:
            if len(bucket.times) > 1 and bucket.times[-1] - bucket.times[-2] > GAP_SHARE * self.length:
                yield (
                    f"{bucket.slowest} was final at {self._at(bucket.times[-1])}, the {len(bucket.times) - 1} other "
                    f"gradients of {bucket} at {self._at(bucket.times[-2])}: used in two places? smaller buckets let "
                    "the others go before"
                )

    def end_of_the_way(self, *, has_cause: bool) -> list[str]:
        """Say whether the last bucket took long by itself, or the link was behind before."""
        final = max(self.plain, key=lambda bucket: bucket.complete, default=self.buckets[-1])
        before = max((b.arrived for b in self.buckets if b.launched < final.launched), default=self.start)
        own = final.arrived - max(final.launched, before)
        if final.is_tied or (has_cause and len(final.ready) > 1):
            return []
        if final.arrived > self.end and own >= self.exposed / 2:
            few = "it is one gradient, which no bucket cuts" if len(final.ready) == 1 else "smaller buckets leave less"
            return [f"{final} was complete last, at {self._at(final.complete)}, and took {_ms(own)} by itself: {few}"]
        if has_cause or before - self.end < self.exposed / 2:
            return []
        total = size_text(sum(bucket.num_bytes for bucket in self.buckets))
        return [
            f"the link was behind by {_ms(before - self.end)} when the backward ended: {total} take longer than it "
            "hides; send fewer bytes, or compute more between two steps"
        ]

    def _at(self, moment: float) -> str:
        return f"{min(1.0, (moment - self.start) / self.length):.0%} of the backward"


def _listed(buckets: Sequence[SeenBucket]) -> str:
    return str(buckets[0]) if len(buckets) == 1 else f"{buckets[0]} and {len(buckets) - 1} more"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
