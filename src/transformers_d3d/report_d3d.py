"""What drafting did in one `generate` call: counts, times, and the two lanes of target and drafter.

Knows events and sums; knows nothing about models.
"""

from dataclasses import dataclass, field
from typing import NamedTuple


class TraceEvent(NamedTuple):
    """A stretch of time in a lane, in seconds since the first event's clock started.

    Args:
        lane (`str`): `"target"` or `"drafter"`.
        name (`str`):
            Of the target: `prefill`, `verify`, or `wait` (idle, until it gets a draft). Of the drafter: `prefill`,
            `packed` (successors of the draft that is being verified), `block` (a draft that nothing was prepared for),
            `denoise` (a draft's later denoising step), `head` (from hidden states to a draft, or to a part of it).
        round (`int`): 0 for the prefill, then counted from 1. A packed pass belongs to the round that it runs beside.
        start, end (`float`): Seconds.
    """

    lane: str
    name: str
    round: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.start


@dataclass
class DraftReport:
    """What drafting did in one `generate` call. The drafter keeps that of its last call as `drafter.report`.

    A round is one target forward after the prefill. All times are wall-clock seconds.

    Args:
        accepted (`list[int]`): Draft tokens kept in each round, the bonus token not counted.
        proposed (`list[int]`): Draft tokens proposed in each round.
        outcomes (`list[tuple[int, bool]]`):
            For each verification that successors were drafted for: the number of draft tokens kept, and whether its
            outcome was among those prepared (a hit).
        events (`list[TraceEvent]`): What target and drafter did when.
        mode (`str`): Back end of the drafter's passes: `"inline"` (in turn with the target), `"thread"` or `"stream"`.
        reason (`str`): Why this one.
    """

    accepted: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    outcomes: list[tuple[int, bool]] = field(default_factory=list)
    events: list[TraceEvent] = field(default_factory=list)
    mode: str = "inline"
    reason: str = ""

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.accepted)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens for each round (tau), the bonus token counted; NaN without rounds."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else float("nan")

    @property
    def histogram(self) -> list[int]:
        """Number of rounds in which 0, 1, 2 ... draft tokens were kept."""
        return [self.accepted.count(n) for n in range(max(self.accepted, default=0) + 1)]

    @property
    def accepted_by_position(self) -> list[float]:
        """For each position in the draft, the share in [0, 1] of the proposals there that were kept."""
        proposals = [sum(n > i for n in self.proposed) for i in range(max(self.proposed, default=0))]
        return [sum(n > i for n in self.accepted) / total for i, total in enumerate(proposals)]

    @property
    def hits(self) -> int:
        """Verifications whose outcome was prepared: the next draft cost only its head."""
        return sum(hit for _, hit in self.outcomes)

    @property
    def misses(self) -> int:
        """Verifications whose outcome was not prepared: the next draft took a pass, with the target waiting."""
        return len(self.outcomes) - self.hits

    @property
    def hit_rate(self) -> float:
        """Share of hits in [0, 1]; NaN when no successors were drafted."""
        return self.hits / len(self.outcomes) if self.outcomes else float("nan")

    @property
    def hit_rate_by_accepted(self) -> dict[int, float]:
        """Share of hits in [0, 1] among the verifications that kept 0, 1, 2 ... draft tokens."""
        kept = sorted({n for n, _ in self.outcomes})
        return {n: sum(h for m, h in self.outcomes if m == n) / sum(m == n for m, _ in self.outcomes) for n in kept}

    def _seconds(self, lane: str, *names: str) -> float:
        return sum(event.seconds for event in self.events if event.lane == lane and event.name in names)

    @property
    def drafting_s(self) -> float:
        """Seconds in which the drafter worked, its prefill not included."""
        return self._seconds("drafter", "packed", "block", "denoise", "head")

    @property
    def drafter_prefill_s(self) -> float:
        """Seconds of the drafter's pass over the prompt."""
        return self._seconds("drafter", "prefill")

    @property
    def verifying_s(self) -> float:
        """Seconds from each proposal to the target's verdict, its prefill not included."""
        return self._seconds("target", "verify")

    @property
    def target_prefill_s(self) -> float:
        """Seconds of the target's pass over the prompt, up to the first token."""
        return self._seconds("target", "prefill")

    @property
    def waiting_s(self) -> float:
        """Seconds in which the target had to wait for a draft."""
        return self._seconds("target", "wait")

    @property
    def overlapped_s(self) -> float:
        """Seconds in which target and drafter worked at once, the prefill included."""
        target = [event for event in self.events if event.lane == "target" and event.name != "wait"]
        drafter = [event for event in self.events if event.lane == "drafter"]
        # Few events of one lane touch one of the other, so walk both in order.
        total, first = 0.0, 0
        for event in target:
            while first < len(drafter) and drafter[first].end <= event.start:
                first += 1
            for other in drafter[first:]:
                if other.start >= event.end:
                    break
                total += max(min(event.end, other.end) - max(event.start, other.start), 0.0)
        return total

    @property
    def overlap_efficiency(self) -> float:
        """The time that full overlap would take, as a share of what the rounds took; NaN without packed passes."""
        ideal, taken = self.full_and_measured_overlap_s
        return ideal / taken if taken else float("nan")

    @property
    def full_and_measured_overlap_s(self) -> tuple[float, float]:
        """Seconds that full overlap would take, and that the rounds took, summed over the rounds with a packed pass.

        Of each round the longer of verification and packed pass, and the time from its proposal to the next. Misses,
        heads and hand-over are the difference.
        """
        spent = {(event.lane, event.name, event.round): event.seconds for event in self.events}
        ideal = taken = 0.0
        for (lane, name, number), seconds in spent.items():
            verify, wait = spent.get(("target", "verify", number)), spent.get(("target", "wait", number + 1))
            if (lane, name) == ("drafter", "packed") and verify is not None and wait is not None:
                ideal += max(seconds, verify)
                taken += verify + wait
        return ideal, taken

    def timeline(self, first_round: int = 0, num_rounds: int = 6, width: int = 100) -> str:
        """Two lanes of text, target and drafter, of some rounds.

        Args:
            first_round (`int`, *optional*, defaults to 0): Where to begin; 0 is the prefill.
            num_rounds (`int`, *optional*, defaults to 6): How many.
            width (`int`, *optional*, defaults to 100): Characters of a lane.
        """
        events = [event for event in self.events if first_round <= event.round < first_round + num_rounds]
        if not events:
            return f"no events in rounds {first_round} to {first_round + num_rounds - 1}"
        start, end = min(event.start for event in events), max(event.end for event in events)
        scale = width / max(end - start, 1e-9)
        letters = {
            "prefill": "P",
            "verify": "V",
            "wait": ".",
            "packed": "=",
            "block": "B",
            "denoise": "D",
            "head": "h",
        }
        lanes = {"target": [" "] * width, "drafter": [" "] * width}
        for event in events:
            left = min(int((event.start - start) * scale), width - 1)
            right = max(min(round((event.end - start) * scale), width), left + 1)
            lanes[event.lane][left:right] = letters[event.name] * (right - left)
        rows = [f"{name:8}|{''.join(lane)}|" for name, lane in lanes.items()]
        legend = (
            f"{'':9}{end - start:.2f} s, rounds {first_round} to {events[-1].round}; P prefill, V verify, . wait, "
            "= packed, B block, D denoise, h head"
        )
        return "\n".join([*rows, legend])

    def __str__(self) -> str:
        if not self.rounds:
            return "DraftReport: no rounds"
        bars = ", ".join(f"{n}: {count}" for n, count in enumerate(self.histogram))
        text = (
            f"DraftReport: {self.rounds} rounds, mean acceptance length {self.mean_acceptance_length:.2f} (bonus token "
            f"counted), accepted {{{bars}}}; drafting {self.drafting_s:.2f} s, verifying {self.verifying_s:.2f} s, "
            f"waiting {self.waiting_s:.2f} s, overlapped {self.overlapped_s:.2f} s; mode {self.mode}"
        )
        if self.reason:
            text += f" ({self.reason})"
        if self.outcomes:
            text += f"; successors ready {self.hits} of {len(self.outcomes)} times"
        return text
