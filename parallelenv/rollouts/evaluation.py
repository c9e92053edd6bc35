"""Runs whole episodes with a policy in the caller's process, and returns their statistics."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelenv.contract.arguments import Policy, check_policy
from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import count, number
from parallelenv.contract.failures import put
from parallelenv.contract.spaces import object_array
from parallelenv.contract.tracebacks import reports_failures
from parallelenv.engine.episode_stats import OpenEpisodes, refuse_unaddable
from parallelenv.errors import WorkerTimeoutError
from parallelenv.results import StepResult
from parallelenv.rollouts.rollout import RolloutLength, progress_bar
from parallelenv.worker.rollout_recorder import PolicyRunner

if TYPE_CHECKING:
    from parallelenv.engine.engine import Engine, ResetArguments


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """Complete episodes: those of the first env, in order, then those of the second, and so on.

    Attributes:
        returns: ``(num_episodes,)`` float64, the sum of the rewards; an object array if some rewards are not numbers.
        lengths: ``(num_episodes,)`` int64, the number of steps.
        terminated: ``(num_episodes,)`` bool.
        truncated: ``(num_episodes,)`` bool.
        infos: ``(num_episodes,)`` object array of dicts: the info of the last step.
        env_ids: ``(num_episodes,)`` int64: the id of the env that ran the episode.
    """

    returns: Array
    lengths: Array
    terminated: Array
    truncated: Array
    infos: Array
    env_ids: Array

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        has_mean = len(self) and self.returns.dtype != object
        mean = f", return {number(float(self.returns.mean()))} on average" if has_mean else ""
        return f"<Evaluation of {count(len(self), 'episode')}{mean}>"


def evaluate(
    engine: Engine,
    policy: Policy,
    goal: RolloutLength,
    env_ids: Sequence[int],
    each: ResetArguments,
    shows_progress: bool,
) -> Evaluation:
    """Run episodes: each env runs its share of ``goal`` and is then idle."""
    shares = {env_id: share for env_id, share in goal.shares(env_ids).items() if share}  # the first envs have most
    engine.pool.groups.refuse_resting("run_episodes()", shares)
    with progress_bar(goal, shows_progress, "run_episodes") as advance:
        return EpisodeRunner(shares, advance).play(engine, policy, each[: len(shares)])


class EpisodeRunner:
    """Runs, in each env, as many episodes as ``shares`` specifies for that env.

    ``goes_on`` is called with the engine before each step; when it returns ``False``, the run stops early. ``advance``
    is called after each step in which episodes ended, with the number of these episodes.
    """

    def __init__(
        self,
        shares: Mapping[int, float],
        advance: Callable[[int], object] = lambda _: None,
        goes_on: Callable[[Engine], bool] = lambda _: True,
    ) -> None:
        self._shares = shares
        self._advance = advance
        self._goes_on = goes_on
        # The ended episodes of each env: return, length, terminated, truncated and last info.
        self._results: dict[int, list[tuple[Any, ...]]] = {env_id: [] for env_id in shares}
        self._running: OpenEpisodes

    def play(self, engine: Engine, policy: Policy, each: ResetArguments) -> Evaluation:
        """Run until every env has run its share of episodes, and return the episodes.

        The envs are reset at the start, with the seeds and options in ``each``, and need a reset afterwards.
        """
        check_policy(policy)
        env_ids = tuple(self._shares)
        self._running = OpenEpisodes(engine.num_envs)
        with engine.with_continue_done_policy(env_ids) as continuing:  # no env starts an episode by itself
            runner = PolicyRunner(policy, None, continuing.pool.layout)
            engine.forget_seeds(env_ids)  # not earlier: the errors above must not use up the seeds
            try:
                self._play(continuing, runner, env_ids, each)
            except BaseException as error:
                put(error, "partial", self._evaluation())
                if not isinstance(error, WorkerTimeoutError) or reports_failures(error):
                    raise
                late = continuing.pool.late(error.env_ids, continuing.pool.timeout, "run_episodes")
                put(late, "partial", self._evaluation())
                raise late from None
        return self._evaluation()

    def _play(self, engine: Engine, runner: PolicyRunner, env_ids: tuple[int, ...], each: ResetArguments) -> None:
        result: Any = None
        beginning: Sequence[int] = env_ids
        while True:
            if beginning:
                engine.collect_reset(engine.submit_reset(beginning, each), None)
                env_ids = tuple(engine.table.without_exhausted(env_ids))
                result = None  # the result lacks the states of these envs
            if not env_ids or not self._goes_on(engine):
                return
            actions, _ = engine.guard.call_user(runner.act, env_ids, engine.states_of(env_ids, result))
            result = engine.step(actions, env_ids, "item")
            ended = self._note(result)
            if ended:
                self._advance(len(ended))
                runner.forget(ended)
            done = {env_id for env_id in ended if len(self._results[env_id]) >= self._shares[env_id]}
            env_ids = tuple(env_id for env_id in env_ids if env_id not in done)
            beginning = [env_id for env_id in ended if env_id not in done]
            each = [(None, None)] * len(beginning)

    def _note(self, result: StepResult) -> list[int]:
        """Record the result of a step, and return the ids of the envs whose episodes ended in the step."""
        rows, rewards, ends = result.env_ids, result.rewards, np.flatnonzero(result.dones)
        try:
            self._running.add(rows, rewards)
        except Exception:  # a reward may be of any type
            for env_id, *both in zip(rows.tolist(), self._running.returns[rows], rewards, strict=True):
                refuse_unaddable(env_id, both)
            raise
        for place in ends.tolist():
            env_id = int(rows[place])
            total, length = self._running.returns[env_id], int(self._running.lengths[env_id])
            flags = bool(result.terminated[place]), bool(result.truncated[place])
            self._results[env_id].append((total, length, *flags, result.infos[place]))
        self._running.begin(rows[ends])
        return rows[ends].tolist()  # type: ignore[no-any-return]

    def _evaluation(self) -> Evaluation:
        rows = [(env_id, *episode) for env_id, ended in self._results.items() for episode in ended]
        env_ids, returns, lengths, terminated, truncated, infos = zip(*rows, strict=True) if rows else ((),) * 6
        are_numbers = all(isinstance(one, (int, float, np.integer, np.floating)) for one in returns)
        totals = object_array(returns)
        if are_numbers:
            with contextlib.suppress(OverflowError):  # an int too large for a float stays an int
                totals = np.array(returns, dtype=np.float64)
        return Evaluation(
            totals,
            np.array(lengths, dtype=np.int64),
            np.array(terminated, dtype=bool),
            np.array(truncated, dtype=bool),
            object_array(infos),
            np.array(env_ids, dtype=np.int64),
        )


def join_evaluations(parts: Sequence[tuple[Evaluation, int]]) -> Evaluation:
    """Return the episodes of all parts, in the order of the parts.

    Each part comes with the number of its envs. The envs of all parts are numbered in the order of the parts.
    """
    evaluations, sizes = zip(*parts, strict=True)
    offsets = itertools.accumulate(sizes[:-1], initial=0)
    names = ("returns", "lengths", "terminated", "truncated", "infos")
    joined = {name: np.concatenate([getattr(one, name) for one in evaluations]) for name in names}
    env_ids = [one.env_ids + offset for one, offset in zip(evaluations, offsets, strict=True)]
    return Evaluation(**joined, env_ids=np.concatenate(env_ids))
