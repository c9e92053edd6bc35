"""Whole episodes played with a policy in the caller's process, and their statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from parallelenv.contract.arguments import check_policy
from parallelenv.contract.batch import Array
from parallelenv.contract.error_text import count, number, show
from parallelenv.contract.failures import put
from parallelenv.contract.spaces import object_array
from parallelenv.engine.episode_stats import OpenEpisodes
from parallelenv.errors import EnvContractError, WorkerTimeoutError
from parallelenv.results import StepResult
from parallelenv.rollouts.rollout_length import RolloutLength, progress_bar
from parallelenv.worker.policy_runner import PolicyRunner

if TYPE_CHECKING:
    from parallelenv.engine.engine import Engine, ResetArgumentsOfEach


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """Complete episodes: those of the first env, in order, then those of the second ...

    Attributes:
        returns: ``(num_episodes,)`` float64, the sum of the rewards; an object array if some are not numbers.
        lengths: ``(num_episodes,)`` int64, the number of steps.
        terminated: ``(num_episodes,)`` bool.
        truncated: ``(num_episodes,)`` bool.
        infos: ``(num_episodes,)`` object array of dicts: the info of the last step.
        env_ids: ``(num_episodes,)`` int64: the env that played it.
    """

    returns: Array
    lengths: Array
    terminated: Array
    truncated: Array
    infos: Array
    env_ids: Array

    def __len__(self) -> int:
        """Return the number of episodes."""
        return len(self.lengths)

    def __repr__(self) -> str:
        """Return one line."""
        has_mean = len(self) and self.returns.dtype != object
        mean = f", return {number(float(self.returns.mean()))} on average" if has_mean else ""
        return f"<Evaluation of {count(len(self), 'episode')}{mean}>"


EpisodesByEnv = dict[int, list[tuple[Any, ...]]]
"""Of each env the episodes that have ended: return, length, terminated, truncated and last info."""


def evaluate(
    engine: Engine,
    player: Callable[..., Any],
    goal: RolloutLength,
    env_ids: Sequence[int],
    each: ResetArgumentsOfEach,
    announce: Callable[[Sequence[int]], Any],
    shows_progress: bool,
) -> Evaluation:
    """Play episodes. The envs begin with a reset, and need one afterwards.

    Args:
        engine: Engine of the envs.
        player: The policy that acts.
        goal: How many episodes.
        env_ids: The envs; each plays its share, and then rests.
        each: Seed and options of the first reset of each.
        announce: Called with the ids of the envs to be reset, once no argument can be refused any more.
        shows_progress: Whether to show a bar, on a terminal or in a notebook.

    Raises:
        BaseException: What an env or the policy raised; ``error.partial`` has the episodes so far.
    """
    check_policy(player)
    shares: dict[int, float] = {env_id: share or 0 for env_id, share in goal.shares(env_ids).items()}
    asked = [place for place, env_id in enumerate(env_ids) if shares[env_id]]
    playing = tuple(env_ids[place] for place in asked)
    with progress_bar(goal, shows_progress, "run_episodes") as advance:
        return _play(engine, player, shares, playing, [each[place] for place in asked], announce, advance)


def perform(
    engine: Engine,
    player: Callable[..., Any],
    env_ids: Sequence[int],
    each: ResetArgumentsOfEach,
    announce: Callable[[Sequence[int]], Any],
    look: Callable[[], bool],
) -> Evaluation:
    """Play until ``look`` returns False. The envs begin with a reset, and need one afterwards.

    Args:
        engine: See `evaluate`.
        player: See `evaluate`.
        env_ids: The envs.
        each: See `evaluate`.
        announce: See `evaluate`.
        look: Called when all have begun, and after each step: whether to continue.

    Raises:
        BaseException: See `evaluate`, or what ``look`` raised.
    """
    check_policy(player)
    shares = dict.fromkeys(env_ids, math.inf)
    return _play(engine, player, shares, tuple(env_ids), each, announce, lambda _: None, look)


def _play(
    engine: Engine,
    player: Callable[..., Any],
    shares: dict[int, float],
    env_ids: tuple[int, ...],
    each: ResetArgumentsOfEach,
    announce: Callable[[Sequence[int]], Any],
    advance: Callable[[int], Any],
    look: Callable[[], bool] = lambda: True,
) -> Evaluation:
    results: EpisodesByEnv = {env_id: [] for env_id in env_ids}
    with engine.borrowed(env_ids) as own:
        game = _EpisodeRunner(own, PolicyRunner(player, None, own.pool.layout), shares, results, advance, look)
        announce(env_ids)
        try:
            game.play(env_ids, each)
        except WorkerTimeoutError as error:
            late = own.pool.late(error.env_ids, own.timeout, "run_episodes")
            put(late, "partial", _evaluation(results))
            raise late from None
        except BaseException as error:
            put(error, "partial", _evaluation(results))
            raise
    return _evaluation(results)


class _EpisodeRunner:
    """Plays episodes.

    Args:
        engine: Its done policy must step ended envs on: no env begins an episode by itself.
        player: The policy that acts.
        shares: Number of episodes of each env.
        results: Where results are added.
        advance: Moves the bar forward.
        look: Called before each step: whether to continue.
    """

    def __init__(
        self,
        engine: Engine,
        player: PolicyRunner,
        shares: dict[int, float],
        results: EpisodesByEnv,
        advance: Callable[[int], Any],
        look: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._player = player
        self._shares = shares
        self._results = results
        self._running = OpenEpisodes(engine.num_envs)
        self._advance = advance
        self._look = look

    def play(self, env_ids: tuple[int, ...], each: ResetArgumentsOfEach) -> None:
        """Play until every env has played its share. Envs that finish early rest while the others play on.

        An env without a further episode is finished, too.
        """
        engine = self._engine
        self._reset(env_ids, each)
        env_ids = tuple(engine.table.living(env_ids))
        result: Any = None
        while env_ids and self._look():
            actions, _ = self._player.act(env_ids, engine.states_of(env_ids, result))
            result = engine.step(actions, env_ids, "item")
            ended = self._note(result)
            if not ended:
                continue
            self._advance(len(ended))
            self._player.forget(ended)
            left = {env_id: self._shares[env_id] - len(self._results[env_id]) for env_id in ended}
            env_ids = tuple(env_id for env_id in env_ids if left.get(env_id, 1))
            again = [env_id for env_id in ended if left[env_id]]
            if again:
                self._reset(again, [(None, None)] * len(again))
                env_ids = tuple(engine.table.living(env_ids))
                result = None  # it lacks the states of these

    def _reset(self, env_ids: Sequence[int], each: ResetArgumentsOfEach) -> None:
        self._engine.collect_reset(self._engine.submit_reset(env_ids, each), None)

    def _note(self, result: StepResult) -> list[int]:
        """Count a step and return the envs whose episodes it ended."""
        rows, rewards, ends = result.env_ids, result.rewards, np.flatnonzero(result.dones)
        try:
            self._running.add(rows, rewards)
        except Exception as error:  # a reward may be of any type
            raise self._cannot_be_added(rows, rewards, error) from error
        for place in ends.tolist():
            env_id = int(rows[place])
            total, length = self._running.returns[env_id], int(self._running.lengths[env_id])
            flags = bool(result.terminated[place]), bool(result.truncated[place])
            self._results[env_id].append((total, length, *flags, result.infos[place]))
        self._running.begin(rows[ends])
        return rows[ends].tolist()  # type: ignore[no-any-return]

    def _cannot_be_added(self, rows: Array, rewards: Array, error: Exception) -> EnvContractError:
        """Return the error that names an env whose reward is not a number or an array."""
        for env_id, reward in zip(rows.tolist(), rewards, strict=True):
            try:
                self._running.returns[env_id] + reward
            except Exception as own:  # noqa: BLE001 (any type, see above)
                error = own
                break
        return EnvContractError(
            f"env {env_id} gave the reward {show(reward)}, which cannot be added to those before it "
            f"({type(error).__name__}: {error}). run_episodes() sums the rewards of an episode: let the env "
            "give numbers or arrays, or play by rollout() or step()."
        )


def _evaluation(results: EpisodesByEnv) -> Evaluation:
    """Return the episodes that have ended."""
    rows = [(env_id, *episode) for env_id, ended in results.items() for episode in ended]
    env_ids, returns, lengths, terminated, truncated, infos = zip(*rows, strict=True) if rows else ((),) * 6
    are_numbers = all(isinstance(one, (int, float, np.integer, np.floating)) for one in returns)
    return Evaluation(
        np.array(returns, dtype=np.float64) if are_numbers else object_array(returns),
        np.array(lengths, dtype=np.int64),
        np.array(terminated, dtype=bool),
        np.array(truncated, dtype=bool),
        object_array(infos),
        np.array(env_ids, dtype=np.int64),
    )
