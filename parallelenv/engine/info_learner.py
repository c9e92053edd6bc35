"""Learns the form of infos, that is, their keys and the types of their values, while envs are stepped."""

from __future__ import annotations

from collections.abc import Sequence

from parallelenv.contract.batch import InfoForm, form_of
from parallelenv.contract.spaces import Info

_NUM_ALIKE = 3
"""A form gets columns after this many steps in a row whose infos had the same form as those of the previous step."""
_NUM_MISSES = 16
"""A form is given up after this many steps in a row in which most infos did not fit its columns."""
_NUM_TRIES = 64
"""Learning stops after this many steps whose infos cannot be in columns.

A form that is given up counts as `_NUM_MISSES` such steps.
"""


class InfoLearner:
    """Decides which form of infos is stored in columns of the batch.

    There is one learner for the infos of steps and another for the infos of resets.

    Attributes:
        form: The form that is stored in columns; empty if there is none.
    """

    def __init__(self) -> None:
        self.form: InfoForm = ()
        self._candidate: InfoForm = ()
        self._num_alike = 0
        self._num_misses = 0
        self._tries = _NUM_TRIES
        self._generation = -1

    def learn(self, infos: Sequence[Info], num_envs: int, generation: int, num_steps: int) -> bool:
        """Learn from those infos of one step that are not in columns.

        Args:
            infos: The infos that are not in columns. They are ignored unless there are more than ``num_envs / 2`` of
                them.
            num_envs: Number of envs that were stepped.
            generation: The `Pool.generation`. If it has changed, hosts may be new and not know the form.
            num_steps: The approximate number of steps since the last call. All infos of the steps between the two calls
                were empty or in columns.

        Returns:
            Whether the form must be sent to the hosts.
        """
        is_told = not self.form or generation == self._generation
        if not infos and is_told:
            return False
        if 2 * len(infos) <= num_envs and is_told:
            self._num_misses = 0
            return False
        if self.form and is_told:
            self._num_misses = self._num_misses + 1 if num_steps < _NUM_ALIKE else 1
            if self._num_misses < _NUM_MISSES:
                return False
            self.form, self._num_alike, self._num_misses = (), 0, 0
            self._tries -= _NUM_MISSES
            return True
        if self.form:
            self._generation = generation
            return True
        if self._tries <= 0:
            return False
        form = form_of(infos[0]) or ()
        self._num_alike = self._num_alike + 1 if form and form == self._candidate else 0
        self._candidate = form
        self._tries -= not form
        if self._num_alike < _NUM_ALIKE:
            return False
        self.form, self._generation = form, generation
        return True
