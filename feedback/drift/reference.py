"""What a drafter is expected to accept in a stratum, and how far a session is from it.

A verify step of L drafted tokens commits 1 + sum_j S(j) tokens on average, S(j) = h(1) ... h(j). Its derivative by
h(k) is S(k-1) V(k), where V(k) = 1 + h(k+1) V(k+1) is what accepting position k is worth: its own token and those
expected behind it. So, to first order in the hazards, with h(k) estimated by accepted(k) / reached(k),

    delta tau = sum_k S(k-1) V(k) (h(k) - h0(k)).

Where every step offers all L tokens, reached(k) is steps * S(k-1), and steps * delta tau is
sum_k V(k) (accepted(k) - h0(k) reached(k)): then even exactly, for it telescopes into the committed tokens less those
expected (their Doob decomposition). Each term has mean zero under the reference whatever happened before k, so
residuals add over steps, turns and sessions, and no ratio is averaged. Answers end inside blocks, so that fewer steps
reach far positions than S(k-1) says; the weights put them back in at the reference's rate:

    w(k) = V(k) / tau0 * S(k-1) / (reached0(k) / reached0(1))
    sum_k w(k) (accepted(k) - h0(k) reached(k)), over sum of reached(1), = relative change of tau.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from redraft.engine.types import DrafterVersion, Stratum

Counts = tuple[Sequence[int], Sequence[int]]
"""``reached`` and ``accepted`` by position from 1, over exploration steps."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Hazards by position, the weights of residuals against them, and the accept length they make.

    >>> profile = Profile.of((100, 80, 40), (80, 40, 10))
    >>> round(profile.tau, 9), round(profile.residual((10, 8, 4), (8, 4, 1)), 9)
    (2.3, 0.0)
    >>> drop = profile.residual((1000, 760, 380), (760, 380, 95)) / 1000
    >>> round(drop, 9) == round((1 + 0.76 * (1 + 0.5 * 1.25)) / 2.3 - 1, 9)  # the first hazard fell from 0.80 to 0.76
    True
    """

    hazard: tuple[float, ...]
    weights: tuple[float, ...]
    tau: float

    @classmethod
    def of(cls, reached: Sequence[int], accepted: Sequence[int]) -> Profile:
        """Of pooled counts; it ends before the first position that no step reached."""
        depth = next((k for k, count in enumerate(reached) if not count), len(reached))
        hazard = [accepted[k] / reached[k] for k in range(depth)]
        survival, worth = [1.0], [1.0] * depth
        for h in hazard:
            survival.append(survival[-1] * h)
        for k in range(depth - 2, -1, -1):
            worth[k] = 1 + hazard[k + 1] * worth[k + 1]
        tau = sum(survival)
        weights = [worth[k] / tau * survival[k] * reached[0] / reached[k] for k in range(depth)]
        return cls(tuple(hazard), tuple(weights), tau)

    def residual(self, reached: Sequence[int], accepted: Sequence[int]) -> float:
        """Relative change of accept length, times verify steps (``reached[0]``)."""
        return math.fsum(
            w * (a - h * r) for w, h, r, a in zip(self.weights, self.hazard, reached, accepted, strict=False)
        )


class Reference(Struct, frozen=True, kw_only=True):
    """What one drafter version did in one stratum while nothing was wrong: what drift is a departure from.

    ``variance``, ``skewness`` and ``kurtosis`` are of a session's residual.
    """

    stratum: Stratum
    drafter: DrafterVersion
    reached: tuple[int, ...]
    accepted: tuple[int, ...]
    sessions: int
    variance: float
    skewness: float
    kurtosis: float

    @property
    def exposure(self) -> float:
        """Exploration steps a session."""
        return self.reached[0] / self.sessions

    @property
    def cv(self) -> float:
        """Relative standard error of tau from one session; from n sessions it is this over the root of n."""
        return self.cv_at(self.exposure)

    def cv_at(self, exposure: float) -> float:
        """The same of sessions with another number of steps: what differs between sessions stays, chance does not."""
        own = _sampling(Profile.of(self.reached, self.accepted), self.reached, self.accepted) / self.reached[0]
        between = self.variance / self.exposure**2 - own / self.exposure
        return math.sqrt(max(0.0, between) + own / exposure)


def make_reference(stratum: Stratum, drafter: DrafterVersion, sessions: Sequence[Counts]) -> Reference:
    """Pool whole sessions of a stratum; raises ValueError unless two have exploration steps.

    The variance is at least that of independent verify steps.
    """
    sessions = [counts for counts in sessions if counts[0] and counts[0][0]]
    if len(sessions) < 2:
        raise ValueError(f"a reference takes two sessions with exploration steps, not {len(sessions)}")
    depth = max(len(reached) for reached, _ in sessions)
    reached, accepted = (
        tuple(sum(counts[side][k] for counts in sessions if k < len(counts[side])) for k in range(depth))
        for side in (0, 1)
    )
    profile = Profile.of(reached, accepted)
    residuals = [profile.residual(*counts) for counts in sessions]
    moments = [math.fsum(r**power for r in residuals) / len(residuals) for power in (2, 3, 4)]
    sampling = _sampling(profile, reached, accepted)
    return Reference(
        stratum=stratum,
        drafter=drafter,
        reached=reached,
        accepted=accepted,
        sessions=len(sessions),
        variance=max(moments[0] * len(sessions) / (len(sessions) - 1), sampling / len(sessions)),
        skewness=moments[1] / moments[0] ** 1.5 if moments[0] else 0.0,
        kurtosis=moments[2] / moments[0] ** 2 if moments[0] else 3.0,
    )


def _sampling(profile: Profile, reached: Sequence[int], accepted: Sequence[int]) -> float:
    """Variance of a residual if its verify steps were independent."""
    counts = zip(profile.weights, reached, accepted, strict=False)
    return math.fsum(w**2 * (a + 0.5) * (r - a + 0.5) / (r + 1) for w, r, a in counts)
