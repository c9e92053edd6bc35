"""The pipe by which a process detects that the caller has exited or released it."""

from __future__ import annotations

import os
import select
import sys
from typing import Any

import pytest

from parallelenv.backends._parent_death import CallerGoneError, ParentDeathPipe, death_descriptor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is none")


def is_cut(fileno: int, patience: float = 0.0) -> bool:
    return bool(select.select([fileno], [], [], patience)[0])


def test_owner_can_cut_the_parent_death_pipe() -> None:
    lifeline = ParentDeathPipe()
    fileno: Any = death_descriptor(lifeline.address)
    lifeline.keep(is_held=True)
    assert not is_cut(fileno)
    lifeline.cut()
    assert is_cut(fileno)
    os.close(fileno)


def test_parent_death_pipe_is_cut_when_garbage_collected() -> None:
    lifeline = ParentDeathPipe()
    fileno: Any = death_descriptor(lifeline.address)
    del lifeline
    assert is_cut(fileno)
    os.close(fileno)


def test_forked_child_does_not_keep_the_parent_death_pipe_open() -> None:
    lifeline = ParentDeathPipe()
    fileno: Any = death_descriptor(lifeline.address)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # keep running
        os._exit(0)
    lifeline.cut()
    assert is_cut(fileno, 10.0)
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)
    os.close(fileno)


def test_cut_when_free_waits_until_other_end_closes_or_timeout() -> None:
    lifeline = ParentDeathPipe()
    fileno: Any = death_descriptor(lifeline.address)
    lifeline.keep(is_held=True)
    os.close(fileno)
    lifeline.cut_when_free(60.0)
    other = ParentDeathPipe()
    fileno = death_descriptor(other.address)
    other.keep(is_held=True)
    other.cut_when_free(0.01)
    assert is_cut(fileno)
    os.close(fileno)


def test_attaching_to_a_cut_pipe_raises_caller_gone_error() -> None:
    lifeline = ParentDeathPipe()
    address = lifeline.address
    lifeline.cut()
    with pytest.raises(CallerGoneError):
        death_descriptor(address)
    with pytest.raises(CallerGoneError), open(os.devnull) as file:
        death_descriptor(address._replace(fileno=file.fileno()))


def test_death_descriptor_is_none_on_another_machine() -> None:
    lifeline = ParentDeathPipe()
    assert death_descriptor(None) is None
    assert death_descriptor(lifeline.address._replace(place="elsewhere")) is None
    lifeline.cut()
