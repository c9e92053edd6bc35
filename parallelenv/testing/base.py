"""Common base of the parts of the suite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import pytest

from parallelenv.env import ParallelEnv
from parallelenv.testing.scenario import ID_FORMS


class Make(Protocol):
    """Makes a `ParallelEnv` that is closed after the test."""

    def __call__(self, envs: Any, asynchronous: Any = None, **kwargs: Any) -> ParallelEnv:
        """Return the `ParallelEnv`."""
        ...


class Contract:
    """Base of the parts of the suite.

    Attributes:
        para_mode: Mode under test: a word or a backend class.
        backend_options: Options passed to it.
        starts_slowly: Whether workers start slowly, so that fewer combinations are tested.
    """

    para_mode: Any = None
    backend_options: Mapping[str, Any] = {}
    starts_slowly: bool = False

    @pytest.fixture
    def make(self) -> Iterator[Make]:
        """Make envs in the mode under test, with two workers by default."""
        yield from _maker(self.para_mode, self.backend_options)

    @pytest.fixture
    def make_oracle(self) -> Iterator[Make]:
        """Make envs in the mode ``dummy``, whose results are correct by definition."""
        yield from _maker("dummy", {})


def _maker(para_mode: Any, options: Mapping[str, Any]) -> Iterator[Make]:
    made: list[ParallelEnv] = []

    def make(envs: Any, asynchronous: Any = None, **kwargs: Any) -> ParallelEnv:
        arguments = {"num_cpus": 2, **options, **kwargs}
        made.append(ParallelEnv(envs, para_mode, asynchronous, **arguments))
        return made[-1]

    yield make
    for env in made:
        env.close()


def all_forms() -> list[Any]:
    """Return each form of ``id`` once."""
    return [form for index, form in enumerate(ID_FORMS) if form is not None or index == 0]
