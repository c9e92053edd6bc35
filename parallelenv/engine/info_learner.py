"""Learns the form of infos while envs are stepped."""

from __future__ import annotations

from collections.abc import Sequence

from parallelenv.contract.batch import InfoForm, form_of
from parallelenv.contract.spaces import Info

_NUM_ALIKE = 3
"""Number of steps in a row whose infos have one form before that form gets columns."""
_NUM_MISSES = 16
"""Number of steps in a row in which many infos differ in form from the columns before the form is given up."""
_NUM_TRIES = 64
"""Number of steps whose infos have no form for columns, and of changes to the form, after which learning stops."""


class InfoLearner:
    """Decides which form of one kind of infos has columns in the batch.

    Attributes:
        form: The form; empty: none.
    """

    def __init__(self) -> None:
        self.form: InfoForm = ()
        self._candidate: InfoForm = ()
        self._num_alike = 0
        self._num_misses = 0
        self._tries = _NUM_TRIES
        self._generation = -1

    def learn(self, infos: Sequence[Info], num_envs: int, generation: int, num_steps: int) -> bool:
        """Note a step's infos that came as values. They count if there are more than half of ``num_envs`` of them.

        ``generation`` shows whether hosts were replaced, because new hosts do not know the form. ``num_steps`` is about
        the number of steps since the last call; the other steps had no values.

        Returns:
            Whether hosts must get the form.
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
