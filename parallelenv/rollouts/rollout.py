"""Rollouts (the stacked steps of many envs), the requested length of a rollout, and functions that join rollouts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from parallelenv.contract.arguments import check_positive
from parallelenv.contract.batch import Array, Batch, Field, Index, gather_states
from parallelenv.contract.error_text import count, show
from parallelenv.contract.failures import Failure
from parallelenv.contract.protocol import Extra
from parallelenv.contract.rollout_data import (
    EpisodeEnds,
    RecurrentState,
    RolloutChunk,
    StepIndex,
    empty_array,
    empty_rows,
    forms_of,
    join_ends,
    join_forms,
    join_memories,
    map_leaves,
    stack_extras,
)
from parallelenv.contract.spaces import Action, Info, State, batch_values, object_array, pick_rows, stack_values
from parallelenv.contract.tensors import is_tensor
from parallelenv.engine.done_policies import DonePolicy
from parallelenv.engine.episode_stats import EndedEpisodes, OpenEpisodes, refuse_unaddable
from parallelenv.engine.groups import Groups
from parallelenv.errors import ArgumentError
from parallelenv.progress import open_bar


@dataclass(frozen=True, eq=False, repr=False)
class Rollout:
    """The steps of many envs. The first axis of the arrays is time; the second is the env, ordered as in ``env_ids``.

    Entries where `valid` is False are zero, or ``None`` in object arrays other than `rewards`. The exception is a step
    in which an env failed: its state is kept and, if known, its action and extras; if the env was restarted, the step
    counts as truncated. Later calls never modify the arrays.

    Attributes:
        states: Inputs of the policy, ``(num_steps, num_envs, *shape)``, nested like the observation space. Parts
            without a fixed shape, such as text, are object arrays ``(num_steps, num_envs)``.
        actions: Actions of the policy, in the same form, nested like the action space. If any part of an action has no
            fixed shape, they are one object array ``(num_steps, num_envs)`` of whole actions.
        rewards: ``(num_steps, num_envs)`` float64; an object array if some rewards are not numbers.
        terminated: ``(num_steps, num_envs)`` bool.
        truncated: ``(num_steps, num_envs)`` bool.
        valid: ``(num_steps, num_envs)`` bool: whether the env made this step.
        extras: Other outputs of the policy, by name, each ``(num_steps, num_envs, ...)``.
        final_states: The next input of the policy, batched as in `StepResult`.
        ended_states: The last state of each episode that ended, ``(num_ended, *shape)``, in the order of the ``True``
            entries in `dones`, as in ``values[rollout.dones] = critic(rollout.ended_states)``. If a failure cut an
            episode off, its last known state is used.
        infos: Infos of steps, by step and env id; empty infos are left out.
        reset_infos: Infos of resets within a step, in the same form.
        env_ids: ``(num_envs,)`` int64.
        starts: ``(num_envs,)`` bool: whether the env's first step in this rollout starts an episode instead of
            continuing one.
        rnn_state: Recurrent state of the policy for each env after the rollout, to pass to the next rollout. Envs
            without a running episode have zeros. Its arrays are torch tensors if the policy's are, and otherwise NumPy
            arrays. ``None`` if the policy has no recurrent state, or if no env has a running episode.
    """

    states: State
    actions: Action
    rewards: Array
    terminated: Array
    truncated: Array
    valid: Array
    extras: dict[str, Array]
    final_states: State
    ended_states: State
    infos: dict[StepIndex, Info]
    reset_infos: dict[StepIndex, Info]
    env_ids: Array
    starts: Array
    rnn_state: Any

    @property
    def dones(self) -> Array:
        """True where a step ended its episode (terminated or truncated), ``(num_steps, num_envs)`` bool."""
        dones: Array = self.terminated | self.truncated
        return dones

    @property
    def episode_returns(self) -> Array:
        """Sum of rewards of each episode that ended, ``(num_ended,)``, in the order of `ended_states`.

        Only steps of this rollout count. `whole_episodes` is True for episodes whose steps are all in this rollout.
        """
        return self._ended_episodes().returns

    @property
    def episode_lengths(self) -> Array:
        """Number of steps of each episode that ended, ``(num_ended,)`` int64. Only steps of this rollout count."""
        return self._ended_episodes().lengths

    @property
    def whole_episodes(self) -> Array:
        """True for each ended episode that also started in this rollout, ``(num_ended,)`` bool."""
        return self._ended_episodes().are_whole

    def _ended_episodes(self) -> EndedEpisodes:
        columns = np.arange(len(self.env_ids))
        return count_episodes(self, OpenEpisodes(len(columns)), columns)

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.valid)

    def __repr__(self) -> str:
        steps, envs = self.valid.shape
        rest = "" if self.valid.all() else f" ({int(self.valid.sum()):,} valid)"
        return (
            f"<Rollout of {count(steps, 'step')} x {count(envs, 'env')}{rest}, "
            f"{count(int(self.dones.sum()), 'episode')} ended>"
        )


def count_episodes(rollout: Rollout, running: OpenEpisodes, rows: Array) -> EndedEpisodes:
    """Add a rollout's steps to the running episodes of its envs, and return the episodes that ended.

    ``rows`` are the rows of ``running`` that belong to the rollout's envs.

    Raises:
        EnvContractError: If rewards cannot be added; ``error.partial`` is the rollout.
    """
    columns = np.flatnonzero(rollout.starts)
    begun = np.column_stack([np.zeros_like(columns), columns])
    made = rollout.valid | rollout.dones
    try:
        return running.add_steps(rows, rollout.rewards, rollout.dones, made, begun, goes_on=True)
    except Exception:  # a reward may be of any type
        for column, (env_id, total) in enumerate(zip(rollout.env_ids.tolist(), running.returns[rows], strict=True)):
            totals = [] if rollout.starts[column] else [total]
            for steps in np.split(np.arange(len(made)), np.flatnonzero(rollout.dones[:, column]) + 1):
                rewards = rollout.rewards[steps[made[steps, column]], column]
                refuse_unaddable(env_id, [*totals, *rewards], rollout)
                totals = []
        raise


class RolloutBuilder:
    """Collects the chunks of a rollout, and stacks them into arrays with one column for each of ``env_ids``.

    ``memory`` is the recurrent state before the rollout; envs that make no step keep theirs.
    """

    def __init__(self, batch: Batch, env_ids: Sequence[int], memory: RecurrentState | None) -> None:
        self._batch = batch
        self._env_ids = env_ids
        self._column = {env_id: column for column, env_id in enumerate(env_ids)}
        self._num_steps = 0
        self._parts: list[tuple[RolloutChunk, tuple[slice, Index]]] = []  # with their index in the stacked arrays
        self._ended: list[EpisodeEnds] = []
        self._said: dict[StepIndex, Extra] = {}
        self._loose: dict[int, Extra] = {}
        # The latest recurrent state with a row for each env, and the number of the row.
        self._memories: dict[int, tuple[RecurrentState, int]] = {}
        if memory is not None:
            rows = enumerate(memory.env_ids)
            self._memories = {env_id: (memory, row) for row, env_id in rows if env_id not in memory.begins}
        self._forms: dict[str, Field] = {}

    def add(self, first: int, chunk: RolloutChunk) -> None:
        """Add a chunk that starts at step ``first`` of the rollout.

        If the chunk's extras cannot be stacked with those of earlier chunks, this counts as a failure of the policy.
        """
        try:
            self._forms = join_forms(self._forms, forms_of(chunk.extras))
        except ArgumentError as error:
            chunk.extras, chunk.broken = {}, chunk.broken or Failure(error, chunk.env_ids[0], "the policy")
        columns = np.array([self._column[env_id] for env_id in chunk.env_ids], dtype=np.int64)
        is_run = (np.diff(columns) == 1).all()
        where = slice(columns[0], columns[0] + len(columns)) if is_run else columns
        self._num_steps = max(self._num_steps, first + chunk.num_steps)
        self._parts.append((chunk, (slice(first, first + chunk.num_steps), where)))
        ended = chunk.ended
        self._ended.append(EpisodeEnds(ended.steps + first, columns[ended.columns], ended.states))
        self._said.update({(step + first, env_id): extra for (step, env_id), extra in chunk.said.items()})
        self._loose.update({env_id: Extra(loose=leaves) for env_id, leaves in chunk.loose.items()})
        if chunk.memory is None:  # the policy has no memory now
            for env_id in chunk.env_ids:
                self._memories.pop(env_id, None)
        else:  # it may have rows for the envs of other hosts, whose own chunks have later ones
            rows = {env_id: row for row, env_id in enumerate(chunk.memory.env_ids)}
            self._memories.update({env_id: (chunk.memory, rows[env_id]) for env_id in rows.keys() & chunk.env_ids})

    def rollout(self, num_steps: int | None, starts: Array, rnn_state: Any) -> Rollout:
        """Stack the chunks into a rollout of ``num_steps`` steps (``None``: all steps)."""
        layout, batch = self._batch.layout, self._batch
        unknown = Extra(loose=[None for array in batch.states if array is None])  # for leaves lost with a worker
        loose = {env_id: self._loose.get(env_id, unknown) for env_id in self._env_ids}
        final_states = gather_states(batch, self._env_ids, batch.rows(self._env_ids), loose, copy=True)
        shape = self._num_steps if num_steps is None else num_steps, len(self._env_ids)
        flags = self._filled(np.zeros((*shape, 2), dtype=bool), "flags")
        ended = join_ends(self._ended, batch.states)
        states = [self._leaf(shape, like, index, "states") for index, like in enumerate(batch.states)]
        actions = [self._leaf(shape, like, index, "actions") for index, like in enumerate(batch.actions or [None])]
        return Rollout(
            layout.states.join([_stacked(leaf) for leaf in states]),
            layout.actions.join([_stacked(leaf) for leaf in actions]) if batch.actions else _stacked(actions[0]),
            self._rewards(shape),
            flags[..., 0].copy(),
            flags[..., 1].copy(),
            self._filled(np.zeros(shape, dtype=bool), "valid"),
            stack_extras(((chunk.extras, place) for chunk, place in self._parts), self._forms, shape),
            final_states,
            layout.states.join([_stacked(leaf) for leaf in ended.states]),
            {place: extra.info for place, extra in sorted(self._said.items()) if extra.info},
            {place: extra.reset_info for place, extra in sorted(self._said.items()) if extra.reset_info},
            np.array(self._env_ids, dtype=np.int64),
            starts,
            rnn_state,
        )

    def rnn_state(self, running: Collection[int]) -> Any:
        """Return the policy's recurrent state after the rollout. Envs that are not in ``running`` get zeros."""
        return join_memories([self._memories.get(env_id) if env_id in running else None for env_id in self._env_ids])

    def _filled(self, array: Array, name: str) -> Array:
        for chunk, place in self._parts:
            array[place] = getattr(chunk, name)
        return array

    def _leaf(self, shape: tuple[int, int], like: Array | None, index: int, name: str) -> Array:
        """Return one leaf of the rollout's states or actions as one array.

        To save memory, each chunk's own array of this leaf is freed as soon as it has been copied.
        """
        array = empty_rows(shape, like)
        for chunk, place in self._parts:
            leaves = getattr(chunk, name)
            array[place] = leaves[index]
            leaves[index] = leaves[index][:0].copy()  # a view would keep the whole array
        return array

    def _rewards(self, shape: tuple[int, int]) -> Array:
        rewards = self._filled(np.zeros(shape), "rewards")
        others = {place: extra.reward[0] for place, extra in self._said.items() if extra.reward is not None}
        if others:
            rewards = rewards.astype(object)
            for (step, env_id), reward in others.items():
                rewards[step, self._column[env_id]] = reward
        return rewards


def _stacked(leaf: Array) -> Any:
    if leaf.dtype != object or not leaf.size:
        return leaf
    values = stack_values(list(leaf.reshape(-1)))
    is_still_loose = getattr(values, "dtype", None) == np.dtype(object)
    return leaf if is_still_loose else values.reshape(leaf.shape + tuple(values.shape[1:]))


_BAR_DELAY = 1.0
"""Seconds until a progress bar appears."""


@dataclass(frozen=True, slots=True)
class RolloutLength:
    """The length of a rollout: either a number of steps or a number of episodes."""

    num_steps: int | None
    num_episodes: int | None

    @classmethod
    def of(cls, num_steps: Any, num_episodes: Any) -> RolloutLength:
        """Return the length that the two arguments of a rollout specify."""
        if (num_steps is None) == (num_episodes is None):
            raise ArgumentError(
                f"num_steps={show(num_steps)} and num_episodes={show(num_episodes)}: give exactly one of them, "
                "rollout(policy, 100) or rollout(policy, num_episodes=20)."
            )
        name, value = ("num_steps", num_steps) if num_episodes is None else ("num_episodes", num_episodes)
        check_positive(name, value)
        return cls(num_steps, num_episodes)

    def check(self, policy: DonePolicy, groups: Groups, env_ids: Sequence[int]) -> None:
        """Raise an `ArgumentError` if the done policy or a vector env does not allow a rollout of this length."""
        groups.refuse_cut("step", env_ids)
        if self.num_episodes is not None:
            groups.refuse_resting("rollout(num_episodes=...)", env_ids, autoreset=policy.autoreset)
        if policy.resets_next:
            raise ArgumentError(
                "rollout() does not support envs that are reset in the next step. Make the ParallelEnv with "
                "asynchronous='restart', or use to_gymnasium('SameStep')."
            )
        if policy.is_shared:
            raise ArgumentError(
                "asynchronous=None stops all envs when one episode ends, but in a rollout workers cannot see each "
                "other's envs. Make the ParallelEnv with asynchronous='restart' (ended envs are reset) or 'idle' "
                "(they wait for a reset)."
            )
        most = max((share or 0 for share in self.shares(env_ids).values()), default=0)
        if most > policy.max_episodes:
            raise ArgumentError(
                f"num_episodes={self.num_episodes} is more than {count(len(env_ids), 'env')} can run: with "
                f"asynchronous={policy.word!r} {policy.after_end}, which allows for "
                f"{policy.max_episodes * len(env_ids):.0f}. Make the ParallelEnv with asynchronous='restart', which "
                "allows for any number, or give num_steps."
            )

    def shares(self, env_ids: Sequence[int]) -> dict[int, int | None]:
        """Return, by env id, how many episodes each env should finish; ``None`` stands for any number."""
        if self.num_episodes is None:
            return dict.fromkeys(env_ids)
        share, rest = divmod(self.num_episodes, len(env_ids) or 1)
        return {env_id: share + (place < rest) for place, env_id in enumerate(env_ids)}


@contextlib.contextmanager
def progress_bar(goal: RolloutLength, is_wanted: bool, name: str = "rollout") -> Iterator[Callable[[int], object]]:
    """Show a progress bar in a notebook or on a terminal, and yield the function that advances the bar."""
    total, unit = (goal.num_steps, " step") if goal.num_episodes is None else (goal.num_episodes, " episode")
    look = "{l_bar}{bar}| {n:,}/{total:,}{unit}s [{elapsed}<{remaining}, {rate_noinv_fmt}]"
    with open_bar(is_wanted, total=total, unit=unit, desc=name, delay=_BAR_DELAY, bar_format=look) as bar:
        yield bar.update


# ---------------------------------------------------------------- joining rollouts, in time and across envs

Nest: TypeAlias = Any
"""States, actions or recurrent states: arrays, tensors or other batches, nested in dicts, tuples and lists."""
Ends = tuple[Nest, Array]
"""Last states of episodes, and an array with the step and the column where each episode ended."""


def refuse_different(one: Rollout, other: Rollout, what: str) -> None:
    """Raise an `ArgumentError` if two rollouts cannot be joined."""
    for name in ("states", "actions", "rnn_state"):
        forms = [map_leaves(getattr(part, name), lambda _: "an array") for part in (one, other)]
        if forms[0] != forms[1] and (name != "rnn_state" or None not in forms):
            raise ArgumentError(f"{what} cannot be joined: their {name} are {forms[0]} and {forms[1]}.")
    try:
        forms_of(one.extras, other.extras)
    except ArgumentError as error:
        raise ArgumentError(f"{what} cannot be joined. {error}") from None


def can_follow(one: Rollout, other: Rollout) -> bool:
    """Return whether the rollout ``other`` can be joined to the earlier rollout ``one`` along the time axis."""
    try:
        refuse_different(one, other, "They")
    except ArgumentError:
        return False
    return len(one.env_ids) == len(other.env_ids)


def join_rollouts(histories: Sequence[Sequence[Rollout]]) -> Rollout:
    """Join rollouts along the time axis and the env axis.

    Each history has consecutive rollouts of the same envs, which are joined along the time axis. The results are then
    joined along the env axis.

    If an env was replaced between two rollouts, the later one may start an episode although the earlier one left the
    env's episode open. The open episode then counts as truncated, and its last known state is used as its ended state.
    Shorter histories are padded with steps that are not valid.
    """
    (first, *rest), *others = histories
    if not rest and not others:
        return first
    parts = [part for history in histories for part in history]
    lasts = [history[-1] for history in histories]
    *columns, num_envs = np.cumsum([0, *(len(last.env_ids) for last in lasts)]).tolist()
    offsets: list[tuple[int, int]] = []
    cuts: list[Ends] = []
    starts: list[Array] = []
    for history, column in zip(histories, columns, strict=True):
        steps = np.cumsum([0, *map(len, history[:-1])]).tolist()
        offsets += [(step, column) for step in steps]
        # The ends of episodes that a part left open, although the next part starts new episodes at its first step.
        dones = np.concatenate([part.dones for part in history])
        made = np.concatenate([part.valid for part in history]) | dones
        starts.append(history[0].starts.copy())
        for before, later, step in zip(history, history[1:], steps[1:], strict=False):
            has_steps = made[:step].any(axis=0)
            starts[-1] |= later.starts & ~has_steps
            last = step - 1 - made[:step][::-1].argmax(axis=0)
            is_open = has_steps & ~dones[last, np.arange(len(last))]
            chosen = np.flatnonzero(later.starts & is_open)
            states = _join_nests(before.states, [before.final_states], partial(_take_rows, rows=chosen))
            cuts.append((states, np.column_stack([last[chosen], chosen + column])))
    env_ids = np.arange(num_envs, dtype=np.int64) if others else first.env_ids
    own = [slice(column, column + len(last.env_ids)) for column, last in zip(columns, lasts, strict=True)]
    join_envs = partial(_put_together, places=own, shape=(num_envs,))
    memories = [(last.rnn_state, place) for last, place in zip(lasts, own, strict=True) if last.rnn_state is not None]
    rnn_state = None
    if memories:  # envs of the other histories get zeros
        nests, places = zip(*memories, strict=True)
        rnn_state = _join_nests(nests[0], nests, partial(_put_together, places=places, shape=(num_envs,)))
    return Rollout(
        **_steps_of_all(parts, offsets, cuts, env_ids),
        env_ids=env_ids,
        starts=np.concatenate(starts),
        final_states=_join_nests(first.states, [last.final_states for last in lasts], join_envs),
        rnn_state=rnn_state,
    )


def _take_rows(leaves: Sequence[Nest], rows: Array) -> Nest:
    (leaf,) = leaves
    return leaf[rows] if hasattr(leaf, "shape") else object_array([pick_rows(leaf, row) for row in rows.tolist()])


def _steps_of_all(
    parts: Sequence[Rollout], offsets: Sequence[tuple[int, int]], cuts: Sequence[Ends], env_ids: Array
) -> dict[str, Any]:
    """Return the per-step fields of joined rollouts.

    ``offsets`` has the first step and column of each part, and ``env_ids`` the env id of each joined column.
    """
    sizes = np.add([part.valid.shape for part in parts], offsets)
    shape = tuple(sizes.max(axis=0).tolist())
    places = [tuple(map(slice, offset, size)) for offset, size in zip(offsets, sizes.tolist(), strict=True)]
    join_steps = partial(_put_together, places=places, shape=shape)
    joined: dict[str, Any] = {}
    for name in ("states", "actions", "rewards", "terminated", "truncated", "valid"):
        nests = [getattr(part, name) for part in parts]
        # Missing rewards are 0, so that rewards of any type can be summed.
        join = partial(join_steps, empty=np.zeros) if name == "rewards" else join_steps
        joined[name] = _join_nests(nests[0], nests, join)
    for _, at in cuts:
        joined["truncated"][tuple(at.T)] = True
    extras = [part.extras for part in parts]
    joined["extras"] = stack_extras(zip(extras, places, strict=True), forms_of(*extras), shape)
    joined_ids = [  # for each part, the joined env ids by the part's own
        dict(zip(part.env_ids.tolist(), env_ids[columns].tolist(), strict=True))
        for part, (_, columns) in zip(parts, places, strict=True)
    ]
    for name in ("infos", "reset_infos"):
        infos = {
            (step + first, joined_id[env_id]): info
            for part, joined_id, (first, _) in zip(parts, joined_ids, offsets, strict=True)
            for (step, env_id), info in getattr(part, name).items()
        }
        joined[name] = {place: infos[place] for place in sorted(infos)}
    # Last states, in the order of the True entries in `dones`.
    dones = joined["terminated"] | joined["truncated"]
    number = dones.ravel().cumsum().reshape(shape) - 1
    ends = [(part.ended_states, np.argwhere(part.dones) + offset) for part, offset in zip(parts, offsets, strict=True)]
    known = [(states, number[tuple(at.T)]) for states, at in (*ends, *cuts) if len(at)] or [(ends[0][0], slice(0))]
    states, numbers = zip(*known, strict=True)
    joined["ended_states"] = _join_nests(
        states[0], states, partial(_put_together, places=numbers, shape=(int(dones.sum()),))
    )
    return joined


def _join_nests(form: Nest, nests: Sequence[Nest], join_leaves: Callable[[Sequence[Nest]], Nest]) -> Nest:
    """Join nests leaf by leaf.

    ``form`` shows which parts are leaves. The ``nests`` themselves do not always show this: in them, a batch of texts
    or graphs is a leaf although it is a tuple, and so is a dict of states without a common space. ``None`` is kept.
    """
    if form is None:
        return None
    if isinstance(form, dict):
        return {key: _join_nests(form[key], [nest[key] for nest in nests], join_leaves) for key in form}
    if isinstance(form, tuple | list):
        joined = [_join_nests(part, [nest[index] for nest in nests], join_leaves) for index, part in enumerate(form)]
        return type(form)(*joined) if hasattr(form, "_fields") else type(form)(joined)
    return join_leaves(nests)


def _put_together(
    leaves: Sequence[Nest], places: Sequence[Any], shape: tuple[int, ...], empty: Callable[..., Array] = empty_array
) -> Nest:
    """Return one leaf, with the leading axes ``shape``, that contains the given leaves at their ``places``.

    ``empty`` makes the array into which they are written.
    """
    if not all(hasattr(leaf, "shape") for leaf in leaves):  # final states, of which some are a tuple or a dict
        sizes = [range(place.stop - place.start) for place in places]
        rows = [pick_rows(leaf, row) for leaf, size in zip(leaves, sizes, strict=True) for row in size]
        return tuple(rows) if all(isinstance(leaf, tuple) for leaf in leaves) else batch_values(rows)
    axes = len(shape)
    if len({(is_tensor(leaf), leaf.shape[axes:], leaf.dtype == object) for leaf in leaves}) > 1:
        heads = [leaf.shape[:axes] for leaf in leaves]
        leaves = [
            object_array([leaf[place] for place in np.ndindex(*head)]).reshape(head)
            for leaf, head in zip(leaves, heads, strict=True)
        ]
    first, shape = leaves[0], (*shape, *leaves[0].shape[axes:])
    is_array = not is_tensor(first)
    whole = empty(shape, np.result_type(*[leaf.dtype for leaf in leaves])) if is_array else first.new_zeros(shape)
    for leaf, place in zip(leaves, places, strict=True):
        whole[place] = leaf
    return whole
