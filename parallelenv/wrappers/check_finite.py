"""A check for nan and infinite numbers in actions, states and rewards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parallelenv.contract import arguments
from parallelenv.contract.arguments import Ids
from parallelenv.contract.spaces import Structure
from parallelenv.contract.tensors import as_array, is_tensor
from parallelenv.errors import EnvContractError
from parallelenv.results import StepResult
from parallelenv.wrappers.base import ParallelWrapper, States, Wrappable

Found = dict[str, list[int]]
"""Ids of the envs with a nan or infinite number, by the place of the number, such as ``"state['camera']"``."""


class CheckFinite(ParallelWrapper):
    """Raises `EnvContractError` as soon as an action, a state or a reward is nan or infinite.

    The error message says which values are bad and in which envs; ``error.env_ids`` lists these envs. Actions are
    checked before anything is sent; those for envs that the step skips are not checked. Results are checked when they
    arrive. If the error is in a result, ``error.partial`` is that result, and all envs in it need a reset.

    Args:
        env: A `ParallelEnv`, or another wrapper.
        check_inf: Whether to refuse infinite numbers as well as nan.
    """

    def __init__(self, env: Wrappable, check_inf: bool = True) -> None:
        arguments.check_flags(check_inf=check_inf)
        super().__init__(env)
        self.check_inf = check_inf
        self._states, self._actions = Structure(env.single_observation_space), Structure(env.single_action_space)

    def on_send(self, action: object, id: Ids) -> None:
        """Check that actions are finite. The step detects any other errors in the actions."""
        resting = self.exhausted | (self.done & (self.unwrapped.asynchronous in (None, "idle")))
        try:
            found = self._find(self._actions, action, "action", self.chosen(id))
        except (LookupError, TypeError):  # not valid actions: the step raises the error
            return
        acting = {where: [env_id for env_id in env_ids if not resting[env_id]] for where, env_ids in found.items()}
        self._raise_if_any(acting, "Nothing was sent.")

    def on_reset(self, states: States, env_ids: tuple[int, ...]) -> States:
        """Return the first states after checking that they are finite."""
        self._raise_if_any(self._find(self._states, states, "state", env_ids))
        return states

    def on_step(self, result: StepResult) -> StepResult:
        """Return the result after checking that its states and rewards are finite."""
        env_ids = result.env_ids.tolist()
        found = self._find(self._states, result.states, "state", env_ids)
        found["reward"] = [env_ids[row] for row in self._bad_rows(result.rewards)]
        if self.restarts:
            ended = zip(env_ids, result.dones, result.infos, strict=True)
            found["last state"] = [env for env, done, info in ended if done and self._is_bad(info.get("ended_state"))]
        self._raise_if_any(found)
        return result

    def _raise_if_any(
        self, found: Found, ending: str = "See error.partial. All envs of this call need a reset."
    ) -> None:
        places = "; ".join(
            f"{where} of {'env' if len(ids) == 1 else 'envs'} {', '.join(map(str, sorted(ids)))}"
            for where, ids in found.items()
            if ids
        )
        if places:
            kind = "nan or infinite" if self.check_inf else "nan"
            env_ids = tuple(sorted({env_id for ids in found.values() for env_id in ids}))
            raise EnvContractError(f"A value is {kind} in: {places}. {ending}", env_ids)

    def _find(self, structure: Structure, batch: States, name: str, env_ids: Sequence[int]) -> Found:
        """Find the envs that have a bad value (see `_is_bad`) in a batch of states or actions."""
        leaves = {name: batch}
        if not structure.is_single and isinstance(batch, (dict, tuple)):  # a list has one action per env
            leaves = {name + structure.describe(index): leaf for index, leaf in enumerate(structure.split(batch))}
        bad = {where: self._bad_rows(leaf) for where, leaf in leaves.items()}
        return {where: [env_ids[row] for row in rows if row < len(env_ids)] for where, rows in bad.items()}

    def _bad_rows(self, leaf: States) -> list[int]:
        """Return the rows of a batch for which `_is_bad` returns ``True``."""
        if isinstance(leaf, dict):  # of an undeclared space
            return sorted({row for part in leaf.values() for row in self._bad_rows(part)})
        leaf = as_array(leaf) if is_tensor(leaf) else leaf
        is_plain = isinstance(leaf, np.ndarray) and leaf.dtype != object
        if is_plain and (leaf.ndim == 0 or not self._is_bad(leaf)):  # the usual case
            return []
        return [row for row, item in enumerate(leaf) if self._is_bad(item)]

    def _is_bad(self, value: object) -> bool:
        """Return whether a value of any type contains nan or, with ``check_inf``, an infinite number."""
        if isinstance(value, dict):
            value = tuple(value.values())
        elif isinstance(value, np.ndarray) and value.dtype == object:
            value = value.reshape(-1).tolist()
        elif is_tensor(value):
            value = as_array(value)
        if isinstance(value, (tuple, list)):
            return any(self._is_bad(part) for part in value)
        if not isinstance(value, (float, complex, np.ndarray, np.inexact)):
            return False
        array = np.asarray(value)
        if array.dtype.kind not in "fc":
            return False
        return bool((~np.isfinite(array) if self.check_inf else np.isnan(array)).any())
