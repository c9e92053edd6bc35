"""What a `ParallelEnv` offers to long runs: rollouts beside the envs, envs rebuilt, and states to go on from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

from parallelenv.contract.messages import list_ids
from parallelenv.engine.checkpoint import SavedState, check_saved
from parallelenv.engine.guard import exclusive
from parallelenv.errors import ArgumentError
from parallelenv.rollouts.length import Goal
from parallelenv.rollouts.local_rollout import roll_here
from parallelenv.rollouts.trajectory import Rollout
from parallelenv.shown import Shown

_OWN_ROLLOUT = "run_batch_episode"
"""The method by which objects that are test units of MetaBox play an episode."""


class LongRuns(Shown):
    """A `ParallelEnv` as far as it is stepped by policies beside its envs, mended and saved."""

    @overload
    def rollout(self, *, id: Any = None) -> list[Any]: ...

    @overload
    def rollout(
        self,
        policy: Callable[..., Any],
        num_steps: int | None = None,
        *,
        num_episodes: int | None = None,
        id: Any = None,
        rnn_state: Any = None,
        progress: bool = True,
    ) -> Rollout: ...

    @exclusive
    def rollout(
        self,
        policy: Callable[..., Any] | None = None,
        num_steps: int | None = None,
        *,
        num_episodes: int | None = None,
        id: Any = None,
        rnn_state: Any = None,
        progress: bool = True,
    ) -> Rollout | list[Any]:
        """Let a policy act beside the envs, and return all of their steps at once.

        The policy travels to the workers once, and nothing else until steps come back: the same steps as by `step`,
        without a round trip for each. Episodes go on where they are, here and in the calls that follow.

        Args:
            policy: ``policy(states)`` returns one action per env. States are as `step` gives them, of the envs of one
                worker that take part, and actions as it takes them, but for one thing: a tuple is always
                ``(actions, rnn_state, extras)``, and a batch of a ``Tuple`` space goes as ``(actions, None, None)``.
                ``extras`` is a flat dict of arrays whose first axis is that of the envs; names, shapes and dtypes must
                go together in all steps. A policy with the parameters
                ``rnn_state`` and ``done`` gets the former back (a nest of arrays with that first axis, ``None`` at
                first), and ``done`` is ``True`` where an episode begins, and where nothing is remembered of it. Every
                worker has a copy of its own, in every mode.
            num_steps: So many steps each env makes, fewer if its policy of ended episodes lets it rest.
            num_episodes: Or so many episodes are ended, each env its share: the first envs one more if they do not
                come out even. An episode that is under way counts. What takes longest is waited for, so short
                episodes are not preferred. With ``"idle"`` one per env at most, with ``"continue"`` none. Envs that are
                exhausted have no share, and those that become so end fewer.
            id: Which envs.
            rnn_state: What the policy remembers of these envs, as `Rollout.rnn_state` of the rollout before: episodes
                under way go on with it. ``None``: nothing.
            progress: Whether a bar shows, on a terminal or in a notebook, from the first second on.

        Returns:
            A `Rollout`. Without a policy: what the objects' own method ``run_batch_episode()`` returned, a list with
            one item per env, as of MetaBox's test units.

        Raises:
            ArgumentError: If not exactly one of ``num_steps`` and ``num_episodes`` is given, or the policy
                ``asynchronous`` does not allow it. If there is no policy, and an env has no ``run_batch_episode()``.
            UnpicklableError: If the policy cannot be copied.
            ResetNeededError, EnvBusyError, EnvPausedError: As `step`. In all these cases nothing was stepped.
            BaseException: What an env raised, after the others have come to the end, or what the policy raised, or
                that a worker died or a chunk of about 0.2 s took longer than ``timeout``, as soon as that is known;
                ``error.partial`` is the `Rollout` so far. Envs whose steps were lost need a reset, after Ctrl-C too.
        """
        env_ids = self._ids(id)
        if policy is None:
            return self._run_batch_episodes(env_ids, num_steps, num_episodes, rnn_state)
        return self._roller.run(policy, env_ids, Goal.of(num_steps, num_episodes), rnn_state, bool(progress))

    def _run_batch_episodes(self, env_ids: Sequence[int], *for_policies: Any) -> list[Any]:
        """Let objects that bring their policy along play by their own method."""
        found = self._pool.ask("has", env_ids, None, _OWN_ROLLOUT).values
        lacking = [env_id for env_id in env_ids if not found.get(env_id)]
        if lacking or any(given is not None for given in for_policies):
            why = f", and envs {list_ids(lacking)} have none" if lacking else ", which takes no arguments"
            raise ArgumentError(
                f"rollout() was called without a policy. Give one: rollout(policy, num_steps=...). Without, it calls "
                f"{_OWN_ROLLOUT}() of each env{why}."
            )
        values = self._pool.ask("call", env_ids, None, _OWN_ROLLOUT).values
        return [values.get(env_id) for env_id in env_ids]

    @exclusive
    def _rollout_here(
        self, policy: Callable[..., Any], num_steps: int, rnn_state: Any, progress: bool, is_over: Callable[[int], bool]
    ) -> Rollout:
        """Make a rollout of all envs that are not paused with a policy in this process, until ``is_over`` says so."""
        return roll_here(self._roller, policy, self._ids(None), Goal.of(num_steps, None), rnn_state, progress, is_over)

    @exclusive
    def restart(self, id: Any = None) -> tuple[int, ...]:
        """Rebuild envs from what they were made from. They need a reset afterwards.

        A worker that died, or is busy with one of them, is replaced, and with it all envs that it owned. What other
        envs of a worker have under way is waited for, ``timeout`` seconds at most. After Ctrl-C they need a reset too.

        Args:
            id: Which envs; ``None`` means all, also the paused.

        Returns:
            Ids of all envs that were rebuilt, ascending.

        Raises:
            InvalidEnvError: If an env was given as a live instance and lives in this process.
            BaseException: What an env's constructor raised.
        """
        return self._stepper.restart(self._ids(id, everyone=True))

    # ---------------------------------------------------------------- states

    @exclusive
    def save_state(self) -> SavedState:
        """Return the state of everything: envs, episodes, seeds. Plain data that can be pickled.

        An env says its state by ``get_state()``, if it also has ``set_state(state)``; any other is pickled.
        Where neither keeps the state (`SavedState.unsaved`), the env needs a reset after `load_state`.

        Raises:
            EnvBusyError: If a step is under way.
            BaseException: What a ``get_state`` raised.
        """
        progress = self._stepper.progress()
        values = self._pool.ask("save", self._everyone).values
        envs = tuple(values.get(env_id) for env_id in self._everyone)
        return SavedState(envs, progress, dict(self._seeds), self._asynchronous)

    @exclusive
    def load_state(self, state: SavedState) -> tuple[int, ...]:
        """Go on from a state, also of another `ParallelEnv` whose envs were made alike, in any mode.

        Steps under way are dropped. The steps that follow are those that would have followed.

        Returns:
            Ids of envs that need a reset, as they did when it was saved or because of `SavedState.unsaved`.

        Raises:
            ArgumentError: If it is of another number of envs or policy; nothing was touched.
            InvalidStateError: If it is of envs that were wrapped otherwise. Those need a reset.
            BaseException: What a ``set_state`` raised. That env needs a reset.
        """
        state = check_saved(state, self._num_envs, self._asynchronous)
        saved = [env_id for env_id in self._everyone if state.envs[env_id] is not None]
        request = self._pool.try_asking("load", saved, [state.envs[env_id] for env_id in saved])
        lost = self._stepper.go_on_from(state.progress, {*state.unsaved, *request.failures})
        self._seeds = dict(state.seeds)
        request.raise_failures(partial=lost)
        return lost
