"""Converts commands and replies to messages and back.

A message is a header of fixed size and, if needed, a pickle and its buffers. The two most common messages, "step all
your envs" and "done, nothing to add", consist of only the header, which has 19 bytes. Buffers of 64 KiB or more follow
the pickle and are not copied (one million float64 values take 11 us instead of 3.9 ms).
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import itertools
import operator
import pickle
import pickletools
import struct
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from parallelenv.contract import copying
from parallelenv.contract.batch import Array
from parallelenv.contract.copying import cannot_be_given, cannot_travel, deep_copy, is_unchangeable
from parallelenv.contract.failures import Failure
from parallelenv.contract.interrupts import signal_behind
from parallelenv.contract.protocol import Command, EnvFacts, Extra, Reply, UnreadableError
from parallelenv.errors import UnpicklableError

_OUT_OF_BAND = 65536
HEADER = struct.Struct("<BHQQ")
"""Tag, subset, command number, and number of bytes between the end of the header and the end of the pickle."""
_SIZES = struct.Struct("<I")

_PICKLED, _STEP, _STEP_AUTORESET, _STEP_OR_RESET_ENDED, DONE, _PLAIN, _NOT_READ = range(7)
PLAIN_STEPS = frozenset({_STEP, _STEP_AUTORESET, _STEP_OR_RESET_ENDED})
"""Tags of messages that make a worker step envs and need no frames."""
MOST_SUBSETS = 1023
"""Maximum number of subsets of a host's envs that get a number, see `StepSubset`."""
PRINTED = 0x80
"""Added to the tag of a reply if the host has printed something that is not part of the message."""


class StepSubset(NamedTuple):
    """Tells a host which of its envs a number stands for in later messages.

    Numbers start at 1. A command to step a numbered subset of envs needs no pickle.
    """

    number: int
    env_ids: tuple[int, ...]


class BroadcastContent(NamedTuple):
    """Gives a host the content of the `Broadcast` in the next command; the command's message omits the content."""

    packed: Array


class Message(NamedTuple):
    """A message between a `MessageChannel` and its host."""

    tag: int  #: Kind of message.
    number: int = 0  #: Number of the command that the message contains or replies to.
    frames: Sequence[Any] = ()  #: A pickle and its out-of-band buffers; empty if the tag is enough.
    subset: int = 0  #: Number that stands for the envs of a plain step, see `StepSubset`; 0: all envs of the host.

    @property
    def nbytes(self) -> int:
        """Size of the frames in bytes."""
        return sum(memoryview(frame).nbytes for frame in self.frames)

    def parts(self) -> list[Any]:
        """Return the bytes and buffers to write, in order."""
        if not self.frames:
            return [HEADER.pack(self.tag, self.subset, self.number, 0)]
        head, *buffers = self.frames
        sizes = struct.pack(f"<I{len(buffers)}Q", len(buffers), *(memoryview(buffer).nbytes for buffer in buffers))
        header = HEADER.pack(self.tag, self.subset, self.number, len(sizes) + len(head))
        return [b"".join((header, sizes, head)), *buffers]

    def to_bytes(self) -> bytes:
        """Return the whole message, for a transport that preserves message boundaries."""
        return b"".join(self.parts())

    @classmethod
    def from_bytes(cls, data: Any) -> Message:
        """Return the message for which `to_bytes` returned ``data``."""
        view = memoryview(data)
        tag, subset, number, nbytes = HEADER.unpack_from(view)
        if not nbytes:
            return cls(tag, number, (), subset)
        end = HEADER.size + nbytes
        head, sizes = split_body(view[HEADER.size : end])
        ends = list(itertools.accumulate(sizes, initial=end))
        return cls(tag, number, [head, *(bytearray(view[begin:end]) for begin, end in itertools.pairwise(ends))])


def split_body(body: memoryview) -> tuple[memoryview, tuple[int, ...]]:
    """Split the bytes that follow a message's header into the pickle and the sizes of its buffers."""
    (count,) = _SIZES.unpack_from(body)
    return body[_SIZES.size + 8 * count :], struct.unpack_from(f"<{count}Q", body, _SIZES.size)


def encode_command(command: Command, host_env_ids: tuple[int, ...], subsets: Mapping[tuple[int, ...], int]) -> Message:
    """Return a command as a message to the host that owns the envs ``host_env_ids``.

    The keys of ``subsets`` are the subsets of envs that the host knows; the values are their numbers. Only users'
    arguments are pickled with cloudpickle, which supports classes and functions defined in a notebook, but takes 31 us
    where pickle takes 17 us.
    """
    is_whole = command.env_ids is host_env_ids
    if command.is_plain_step and command.rows is None and (is_whole or command.env_ids in subsets):
        tag = _STEP_AUTORESET if command.autoreset else _STEP_OR_RESET_ENDED if command.begins_ended else _STEP
        return Message(tag, command.number, (), 0 if is_whole else subsets[command.env_ids])
    pickler = _Pickler if command.each is None else _CloudPickler
    try:
        return Message(_PICKLED, command.number, _dump(pickler, command))
    except Exception as error:  # pickling runs user code, which may raise anything
        if signal_behind(error) is not None:
            raise
        for env_id, argument in zip(command.env_ids, command.each or (), strict=True):
            try:
                _dump(_CloudPickler, argument)
            except Exception as reason:  # the argument for which the error is raised
                if signal_behind(reason) is not None:
                    raise
                raise cannot_be_given(command.operation, env_id, argument, reason) from error
        raise UnpicklableError(
            f"The arguments of {command.operation} cannot be copied to a worker ({error}). Nothing was sent."
        ) from error


def decode_command(message: Message, subsets: Sequence[tuple[int, ...]]) -> Any:
    """Return the command or other object in a message; raise an `UnreadableError` if it cannot be unpickled."""
    tag = message.tag
    if tag == _PICKLED:
        try:
            return decode(message)
        except BaseException as error:  # unpickling runs user code, which may raise anything
            raise UnreadableError(message.number, f"{type(error).__name__}: {error}") from error
    autoreset, begins_ended = tag == _STEP_AUTORESET, tag == _STEP_OR_RESET_ENDED
    return Command(message.number, "step", subsets[message.subset], None, None, autoreset, (), begins_ended)


def encode_reply(reply: Reply) -> Message:
    """Return a reply as a message; a value that cannot be pickled becomes a failure of its env."""
    if not (reply.values or reply.failures or reply.rows or reply.output):
        return Message(DONE, reply.number)
    plain = None if reply.failures or reply.rows or reply.output else _plain_extras(reply.values)
    if plain is not None:
        return Message(_PLAIN, reply.number, [pickle.dumps(plain, protocol=5)])
    for pickler in (_Pickler, _CloudPickler):
        with contextlib.suppress(BaseException):  # user code may raise anything; then try the next one, then each value
            return Message(_PICKLED, reply.number, _dump_reply(pickler, reply))
    for env_id, value in list(reply.values.items()):
        try:
            _dump_reply(_CloudPickler, Reply(reply.number, {env_id: value}))
        except BaseException as error:  # noqa: BLE001 (reported as a failure of this env)
            del reply.values[env_id]
            reply.failures[env_id] = Failure(cannot_travel(value, error), env_id, "the copying of its result")
    return Message(_PICKLED, reply.number, _dump_reply(_CloudPickler, reply))


def encode_not_read(error: UnreadableError) -> Message:
    """Return the reply to a command that could not be read."""
    return Message(_NOT_READ, error.number, [error.reason.encode()])


def decode_reply(message: Message) -> Reply:
    """Return the reply in a message; a value that cannot be unpickled becomes a failure of its env."""
    tag = message.tag & ~PRINTED
    if tag == DONE:
        return Reply(message.number)
    if tag == _NOT_READ:
        raise UnreadableError(message.number, bytes(message.frames[0]).decode())
    if tag == _PLAIN:
        extras = pickle.loads(message.frames[0])
        return Reply(message.number, {env_id: Extra(*parts) for env_id, parts in extras.items()})
    frames = _writable(message.frames)
    head, buffers = io.BytesIO(frames[0]), iter(frames[1:])
    reply: Reply
    try:
        reply, env_ids = copying.Unpickler(head, buffers).load()
    except BaseException as error:  # for example from a user's own space class
        if signal_behind(error) is not None:
            raise
        raise UnreadableError(message.number, f"{type(error).__name__}: {error}") from error
    for env_id in env_ids:
        start, left = head.tell(), operator.length_hint(buffers)
        try:
            reply.values[env_id] = copying.Unpickler(head, buffers).load()
        except BaseException as error:  # reported as a failure of this env
            if signal_behind(error) is not None:
                raise
            failure = UnpicklableError(
                "The result was pickled, but cannot be unpickled in the caller's process "
                f"({type(error).__name__}: {error}). Return plain data, or ask for a part of it with a dotted name."
            )
            failure.__cause__ = error
            reply.failures[env_id] = Failure(failure, env_id, "the copying of its result")
            head.seek(start)  # continue with the next pickle and its buffers
            num_own = sum(opcode.name == "NEXT_BUFFER" for opcode, _, _ in pickletools.genops(head))
            buffers = iter(frames[len(frames) - left + num_own :])
    return reply


def encode(anything: object) -> Message:
    """Return a message that contains an object other than a command or a reply."""
    return Message(_PICKLED, 0, _dump(_CloudPickler, anything))


def decode(message: Message) -> Any:
    """Return the object in a message. Arrays in it are writable."""
    head, *buffers = _writable(message.frames)
    return copying.loads(head, buffers)


def _writable(frames: Sequence[Any]) -> list[Any]:
    """Return the frames; replace read-only buffers, such as Ray's, with copies, so that arrays are writable."""
    head, *buffers = frames
    return [head, *(bytearray(buffer) if memoryview(buffer).readonly else buffer for buffer in buffers)]


def _reduce_array(array: Array) -> object:
    # Without the copy, a read-only array would still be read-only after unpickling.
    return (array if array.flags.writeable else array.copy()).__reduce_ex__(5)


class _Pickler(pickle.Pickler):
    """The pickler of `pickle`, except that unpickled arrays are writable."""

    dispatch_table: ClassVar[Any] = ChainMap({np.ndarray: _reduce_array}, copyreg.dispatch_table)  # type: ignore[misc]


class _CloudPickler(copying.Pickler):
    """The pickler of `copying`, except that unpickled arrays are writable."""

    dispatch_table: ClassVar[Any] = copying.Pickler.dispatch_table.new_child({np.ndarray: _reduce_array})


def _dump(pickler: Any, *parts: object) -> list[Any]:
    """Return the concatenated pickles of the parts, and their large buffers.

    The parts share no objects once they are unpickled.
    """
    buffers: list[Any] = []

    def stays_in_band(buffer: pickle.PickleBuffer) -> bool:
        with buffer.raw() as raw:
            if raw.nbytes < _OUT_OF_BAND:
                return True
        buffers.append(buffer.raw())
        return False

    head = io.BytesIO()
    writer = pickler(head, protocol=5, buffer_callback=stays_in_band)
    for part in parts:
        writer.clear_memo()
        writer.dump(part)
    return [head.getbuffer(), *buffers]


def _dump_reply(pickler: Any, reply: Reply) -> list[Any]:
    """Return a pickle of a reply, followed by a separate pickle of each env's value.

    If all values are immutable, or are `EnvFacts`, which share their spaces on purpose, there is only one pickle. For
    example, 32 numbers take 5 us in one pickle and 31 us in separate ones.
    """
    plain = [value[0] if type(value) is tuple and len(value) == 1 else value for value in reply.values.values()]
    if all(is_unchangeable(value) or type(value) is EnvFacts for value in plain):
        return _dump(pickler, (reply, []))
    rest = Reply(reply.number, {}, reply.failures, reply.rows, reply.output)
    values = [
        # The state and the info of an env may share objects; in the copies, they do not.
        Extra(*map(deep_copy, value)) if type(value) is Extra and sum(part is not None for part in value) > 1 else value
        for value in reply.values.values()
    ]
    return _dump(pickler, (rest, list(reply.values)), *values)


def _plain_extras(values: Mapping[int, Any]) -> dict[int, tuple[object, ...]] | None:
    """Return results of steps as tuples to be pickled together, or ``None`` if the results may share objects.

    Most infos are dicts of numbers and strings, and share nothing. For 8 envs with two numbers each, writing takes 7 us
    and reading 4 us with one pickle; with a pickle for each env, writing takes 26 us and reading 14 us.
    """
    seen: set[int] = set()
    for extra in values.values():
        if type(extra) is not Extra:
            return None
        part: Any
        for part in extra:
            if part is None:
                continue
            kind = type(part)
            if id(part) in seen or kind not in (dict, list, tuple):
                return None
            seen.add(id(part))
            items = (*part, *part.values()) if kind is dict else part  # the class of a key may be defined in a notebook
            if not all(map(is_unchangeable, items)):
                return None
    return {env_id: tuple(extra) for env_id, extra in values.items()}
