"""Computes ratios, and decides whether targets were met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.cases import LIMIT, UNITS, Case, Target
from benchmarks.runner import Outcomes, Results
from benchmarks.systems import BARE, BY_NAME, IN_PROCESS_PEER, PROCESS_PEER
from parallelenv.contract.cpu_cores import usable_cores

_PLURALS = {IN_PROCESS_PEER: "the best in-process peer", PROCESS_PEER: "the best process peer", LIMIT: "the limit"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and its measurements.

    Attributes:
        case: Name of the case.
        target: The target.
        values: One value per round in which both the system and the reference took part.
        failure: Why values are missing; ``None`` if no values are missing.
        disturbed: Number of these rounds in which other programs disturbed the system or the reference.
    """

    case: str
    target: Target
    values: tuple[float, ...]
    failure: str | None
    disturbed: int = 0

    @property
    def measured(self) -> float:
        """The number that counts: the median over the rounds, or the worst round."""
        if not self.target.worst:
            return median(self.values)
        return max(self.values) if self.target.relation == "<=" else min(self.values)

    @property
    def word(self) -> str:
        """``"met"``, ``"missed"``, ``"failed"`` or, if there was nothing to compare with, ``"not measured"``."""
        if self.failure:
            return "failed"
        if not self.values:
            return "not measured"
        return "met" if _holds(self.measured, self.target) else "missed"


def _holds(value: float, target: Target) -> bool:
    if target.relation == "<=":
        return value <= target.bound
    return value >= target.bound if target.relation == ">=" else value > target.bound


def verdicts(cases: Sequence[Case], results: Results) -> list[Verdict]:
    """Return one verdict per target of the cases that were run."""
    return [
        _verdict(case, target, results[case.name]) for case in cases if case.name in results for target in case.targets
    ]


def _verdict(case: Case, target: Target, outcomes: Outcomes) -> Verdict:
    outcome = outcomes[target.system]
    values = ratios(outcomes, target.system, target.against, target.metric)
    sides = [outcome, *(outcomes[name] for name in _meant(outcomes, target.against))]
    disturbed = sum(any(turn in side.disturbed for side in sides) for turn in values)
    return Verdict(case.name, target, tuple(values.values()), outcome.failure, disturbed)


def ratios(outcomes: Outcomes, system: str, against: str, metric: str) -> dict[int, float]:
    """Return, by round, a number of a system divided by the same number of a reference.

    Args:
        outcomes: The outcomes of one case.
        system: The name of the system.
        against: The reference: a system's name, a kind of peer, which means the best of that kind, or ``LIMIT``. If
            empty, the number itself is returned.
        metric: The name of the number.
    """
    factor = usable_cores() if against == LIMIT else 1
    found = {}
    for turn, numbers in outcomes[system].rounds.items():
        others = [outcomes[name].rounds.get(turn, {}).get(metric, 0.0) for name in _meant(outcomes, against)]
        other = factor * max(others, default=0.0) if against else 1.0
        if other and metric in numbers:
            found[turn] = numbers[metric] / other
    return found


def _meant(outcomes: Outcomes, against: str) -> list[str]:
    """Return the names of the systems that ``against`` means. The best of these systems is the reference."""
    against = BARE if against == LIMIT else against
    return [name for name in outcomes if against in (name, BY_NAME[name].kind)]


def wording(target: Target) -> str:
    """Return a target in the form of a table cell."""
    name = "" if target.against else " " + UNITS[target.metric][0]
    other = _PLURALS.get(target.against) or (BY_NAME[target.against].title if target.against else "")
    times = " x " if target.against else ""
    metric = f" ({UNITS[target.metric][0]})" if target.against and target.metric != "rate" else ""
    return f"{target.relation} {target.bound:g}{name}{times}{other}{metric}{', in every round' * target.worst}"
