"""Envs in worker processes, several in each, on this machine; if asked, some in the caller.

Commands and replies go over one pipe per worker; actions, states, rewards and flags of fixed
form lie in shared memory. A step is one small message to each worker and one back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import connection, forkserver, resource_tracker
from typing import Any

from parallelenv.backends.codec import decode_reply, encode, encode_command, unmark_printed
from parallelenv.backends.inprocess import CallerChannel
from parallelenv.backends.log import Log
from parallelenv.backends.memory import SharedMemory
from parallelenv.backends.spread import Spreader
from parallelenv.backends.wire import Message, Wire, spin
from parallelenv.backends.worker import Attach, PackedRecipe, serve
from parallelenv.batch import Batch, Layout
from parallelenv.cores import usable_cores
from parallelenv.errors import ArgumentError, WorkerStartError
from parallelenv.interrupts import Shield
from parallelenv.ownership import own
from parallelenv.protocol import Channel, Command, Death, HostDied, HostRecipe, Plan, Printed, Reply
from parallelenv.recipes import EnvRecipe, registered_by_user

_PRELOADED = ["numpy", "gymnasium", "parallelenv.backends.worker"]
_HEARTBEAT = 0.25
"""Seconds between looks at whether workers live, for deaths that a pipe does not show: an env's
own child process may hold the pipe open."""
_SPIN = 200e-6
"""Seconds that the caller stays awake for an answer before it sleeps, if the latest ones came so quickly.

Else it would only be in the workers' way: on 2 cores it cost 2 workers 10 % of steps of 2.4 ms."""
_BLAS_TIMEOUT = "OPENBLAS_THREAD_TIMEOUT"
_SAFE_BYTES = 65536
"""A pipe takes so much at least, so that sending it cannot block on a worker that is itself
blocked in sending."""

_LAST_CHANCE = 0.3
"""Seconds from asking a worker to end until it is ended, and for the fork server to be gone that dies."""
_UNKNOWN = 255
"""Exit code of a process whose fork server can not tell it any more."""
_NO_COMMAND = 0
"""The number of no command, as they count from 1."""

_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()  # the caller's ends of all pipes
_STARTING = threading.Lock()
_HIDDEN: dict[str, Any] = {}  # what is missing of the main module while a worker is being started


class Poller:
    """Waits for any of many pipes, without making the list anew for every wait.

    Attributes:
        pids: Processes at their other ends.
        is_quick: Whether answers came within `_SPIN` lately, so that it pays to stay awake for them.
        awaits_first: Whether nothing was looked for since the latest message left.
    """

    def __init__(self) -> None:
        self._channels: dict[int, SubprocChannel] = {}
        self.pids: list[int] = []
        self._poll: Any = select.poll() if hasattr(select, "poll") else None
        self.is_quick = True
        self.awaits_first = False
        self._glance: Any = functools.partial(self._poll.poll, 0) if self._poll is not None else None

    def add(self, channel: SubprocChannel) -> None:
        """Watch a channel from now on."""
        self._channels[channel.wire.fileno] = channel
        self.pids.append(channel.process.pid)
        if self._poll is not None:
            self._poll.register(channel.wire.fileno, select.POLLIN)

    def remove(self, channel: SubprocChannel) -> None:
        """Watch a channel no longer. To be called before its pipe is closed."""
        if self._channels.pop(channel.wire.fileno, None) is None:
            return
        self.pids.remove(channel.process.pid)
        if self._poll is not None:
            self._poll.unregister(channel.wire.fileno)

    def wait(self, timeout: float) -> list[SubprocChannel]:
        """Return the channels with something to read or a closed pipe, after ``timeout`` s none."""
        if self._poll is None:  # Windows, and few others
            pipes = {channel.wire.connection: channel for channel in self._channels.values()}
            return [pipes[pipe] for pipe in connection.wait(list(pipes), timeout)]  # type: ignore[index]
        found = self._glance()
        if not found and timeout:
            begin = time.perf_counter()
            found = spin(self._glance, min(_SPIN, timeout)) if self.is_quick else None
            found = found or self._poll.poll(timeout * 1000)
            if self.awaits_first:
                self.awaits_first, self.is_quick = False, time.perf_counter() - begin < _SPIN
        return [self._channels[fileno] for fileno, _ in found]


class SubprocChannel:
    """A pipe to a host in a process of its own."""

    in_caller = False

    def __init__(self, process: Any, pipe: Any, log: Log | None, poller: Poller, env_ids: tuple[int, ...]) -> None:
        self.process = process
        self.wire = Wire(pipe)
        self.inbox: deque[Reply] = deque()
        self.is_gone = False
        self.found_dead = False
        self.env_ids = env_ids
        self._log = log
        self._poller = poller
        self._unanswered = 0
        poller.add(self)

    def pack(self, command: Command) -> Message:  # noqa: D102 (see Channel)
        return encode_command(command, self.env_ids)

    def send(self, packed: Message) -> None:  # noqa: D102 (see Channel)
        # Two ends that both send more than the pipe holds would wait for each other for ever.
        if self._unanswered and packed.frames and packed.nbytes > _SAFE_BYTES:
            while self._unanswered:
                self.inbox.append(self._read())
        try:
            self.wire.send(packed)
        except OSError as error:
            raise HostDied from error
        self._unanswered += 1
        self._poller.awaits_first = True

    def work(self) -> bool:
        """Say if there is a reply that was read already. The counterpart of `CallerChannel.work`."""
        return bool(self.inbox)

    def receive(self) -> Reply:  # noqa: D102 (see Channel)
        return self.inbox.popleft() if self.inbox else self._read()

    def _read(self) -> Reply:
        if self.found_dead and not self.wire.connection.poll(0):  # a process of the env's own keeps the pipe open
            raise HostDied
        try:
            message = self.wire.receive()
        except (EOFError, OSError) as error:
            raise HostDied from error
        self._unanswered -= 1
        message, has_printed = unmark_printed(message)
        reply = decode_reply(message)
        if has_printed:
            reply.output = self.take_output(is_idle=not self._unanswered)
        return reply

    def take_output(self, *, is_idle: bool) -> list[Printed]:
        """Return what was printed since the last time; whole lines only, unless the worker is idle."""
        return [] if self._log is None else self._log.take(self.env_ids, is_idle=is_idle)

    def overhear(self) -> bool:
        """Look if a worker that has not answered prints something; it is received like a reply."""
        output = self.take_output(is_idle=False)
        if output:
            self.inbox.append(Reply(_NO_COMMAND, output=output))
        return bool(output)

    def attach(self, batch: Batch) -> None:  # noqa: D102 (see Channel)
        memory: SharedMemory = batch.owner
        with contextlib.suppress(OSError):  # if it died meanwhile, its next command says so
            self.wire.send(encode(Attach(batch.layout)))
            memory.send(self.wire.connection, self.process.pid)

    def cause_of_death(self) -> Death:  # noqa: D102 (see Channel)
        self.process.join(timeout=1.0)
        last_lines = "" if self._log is None else self._log.last_lines()
        return Death(self.process.pid, self.process.exitcode, last_lines=last_lines)

    def is_dead(self) -> bool:
        """Whether the process has ended. When the fork server has, its processes seem to have ended too."""
        if self.process.is_alive():
            return False
        self.found_dead = self.process.exitcode != _UNKNOWN or not _exists(self.process.pid)
        return self.found_dead

    def hang_up(self) -> None:
        """Close the pipe."""
        if not self.wire.closed:
            self._poller.remove(self)
            self.wire.close()

    def kill(self) -> None:  # noqa: D102 (see Channel)
        if self.is_gone:
            return
        self.hang_up()
        if not self.is_dead():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, getattr(signal, "SIGKILL", signal.SIGTERM))
        self.process.join()
        self.process.close()
        self.is_gone = True
        if self._log is not None:
            self._log.close()


class SubprocBackend:
    """One process per usable core, several envs each.

    Args:
        start_method: ``"forkserver"``, ``"spawn"`` or ``"fork"``. Default: ``"forkserver"`` where
            there is one, else ``"spawn"``. With none of them does a script need an
            ``if __name__ == "__main__"`` guard: the caller's main module is not imported again.
        caller_steps: Whether the caller is one of the workers: it steps its share of the envs, in this
            process, where it would wait, and nobody has to make room for it: 16 CartPoles on 2 cores make
            180,000 steps/s instead of 140,000. What such an env does to its process it does to the
            caller, and no time limit interrupts it.
    """

    uses_live_envs = False

    def __init__(self, *, start_method: str | None = None, caller_steps: bool = False) -> None:
        methods = start_methods()
        if start_method is not None and start_method not in methods:
            raise ArgumentError(f"start_method={start_method!r} does not exist here; expected one of {tuple(methods)}.")
        if not isinstance(caller_steps, bool):
            raise ArgumentError(f"caller_steps={caller_steps!r} must be True or False.")
        self._method = start_method or methods[0]
        self._caller_steps = caller_steps
        self._callers_share: tuple[int, ...] = ()  # env ids of the host in this process
        self._poller = Poller()
        self._spreader = Spreader(caller_steps)
        self._started: list[SubprocChannel] = []  # all that live, also those that nobody was told of yet

    def plan(self, num_envs: int, num_cpus: int | None, num_gpus: float) -> Plan:  # noqa: D102 (see Backend)
        return Plan(min(num_cpus or usable_cores(), num_envs))

    def launch(self, recipes: Sequence[HostRecipe]) -> list[Channel]:  # noqa: D102 (see Backend)
        registered = registered_by_user()
        packed = [PackedRecipe.of(recipe, registered) for recipe in recipes]
        if self._caller_steps and not self._callers_share:
            self._callers_share = packed[-1].env_ids  # the smallest share: the caller has more to do than to step
        ours = [recipe for recipe in recipes if recipe.env_ids == self._callers_share]
        workers = self._start_all([recipe for recipe in packed if recipe.env_ids != self._callers_share])
        return [*workers, *(CallerChannel(_without_live_envs(recipe)) for recipe in ours)]

    def _start_all(self, packed: Sequence[PackedRecipe]) -> list[Channel]:
        if packed and multiprocessing.current_process().daemon:
            raise WorkerStartError(
                "This process is a daemonic one of multiprocessing, which may not start processes. Use "
                "para_mode='dummy' or 'thread' here, or start this process with daemon=False."
            )
        try:
            channels = [self._start(recipe.env_ids, len(packed)) for recipe in packed]
        except BaseException:
            started = {recipe.env_ids for recipe in packed}
            for channel in self._started:
                if channel.env_ids in started:
                    channel.kill()
            raise
        for channel, recipe in zip(channels, packed, strict=True):
            with contextlib.suppress(OSError):  # if it died already, its first command says so
                channel.wire.send(encode(recipe))
        return list(channels)

    def _start(self, env_ids: tuple[int, ...], wanted: int) -> SubprocChannel:
        deadline = time.monotonic() + _LAST_CHANCE
        while True:
            opened: list[Any] = []
            try:
                return self._start_with(opened, env_ids)
            except (OSError, EOFError) as error:  # EOFError: the fork server could not
                for file in opened:
                    file.close()
                # The fork server dies of a start that failed; soon after, the next start begins another.
                if isinstance(error, ConnectionRefusedError) and time.monotonic() < deadline:
                    continue
                raise WorkerStartError(
                    f"A worker process could not be started ({type(error).__name__}: {error}); {wanted} were wanted. "
                    "Give a smaller num_cpus, or raise the limit on processes (ulimit -u), open files (ulimit -n) or "
                    "memory."
                ) from error

    def _start_with(self, opened: list[Any], env_ids: tuple[int, ...]) -> SubprocChannel:
        """Start a worker; note what was opened for it."""
        context: Any = multiprocessing.get_context(self._method)
        ours, theirs = context.Pipe()
        opened += [ours, theirs]
        log = Log.create()
        opened += [log] if log is not None else []
        foreign = [*_OPEN, ours] if self._method == "fork" else []
        try:
            with _STARTING, Shield(), _hidden_main(), _sleepy_blas(), _deaf_to_interrupts(self._method):
                _preload(self._method)
                process = context.Process(target=serve, args=(theirs, log, foreign), name="parallelenv-worker")
                process.start()
                channel = SubprocChannel(process, ours, log, self._poller, env_ids)
                self._started = [*(known for known in self._started if not known.is_gone), channel]
                _OPEN.add(ours)
        finally:
            theirs.close()
        return channel

    def allocate(self, layout: Layout) -> Batch:  # noqa: D102 (see Backend)
        memory = SharedMemory.create(layout.nbytes)
        return Batch(layout, memory.map, owner=memory)

    def wait(self, channels: Sequence[Any], timeout: float | None) -> Sequence[Any]:  # noqa: D102 (see Backend)
        received = [channel for channel in channels if channel.work()]
        if received:
            return [*received, *self._poller.wait(0)]
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._poller.is_quick:  # else the system has time to find a core for each
                self._spreader.look(self._poller.pids)
            left = _HEARTBEAT if deadline is None else min(_HEARTBEAT, deadline - time.monotonic())
            ready = self._poller.wait(max(0.0, left))
            ready = ready or [channel for channel in channels if channel.overhear() or channel.is_dead()]
            if ready or left <= 0:
                return ready

    def close(self, channels: Sequence[Any], timeout: float) -> Sequence[Printed]:
        """Close the pipes, at whose end workers close their envs and leave; end those that do not."""
        deadline = time.monotonic() + timeout
        workers = [channel for channel in self._started if not channel.is_gone]
        for channel in workers:
            channel.hang_up()
        for channel in channels:
            if isinstance(channel, CallerChannel):
                channel.kill()
        for channel in workers:
            channel.process.join(max(0.0, deadline - time.monotonic()))
        stubborn = [channel for channel in workers if not channel.is_dead()]
        for channel in stubborn:
            channel.process.terminate()
        deadline = time.monotonic() + _LAST_CHANCE
        for channel in stubborn:
            channel.process.join(max(0.0, deadline - time.monotonic()))
        printed = [piece for channel in workers for piece in channel.take_output(is_idle=True)]
        for channel in workers:
            channel.kill()
        return printed


def _without_live_envs(recipe: HostRecipe) -> HostRecipe:
    """Return a recipe for the caller whose live envs are copied each time, as workers do it.

    Nothing is unpickled: that would write over classes of a notebook with what they were when pickled.
    """
    envs = [
        EnvRecipe(env.env_id, functools.partial(own, own(env.source)), is_live=False) if env.is_live else env
        for env in recipe.envs
    ]
    return dataclasses.replace(recipe, envs=tuple(envs))


def _exists(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def start_methods() -> list[str]:
    """Return the start methods of this system, the default one first."""
    methods = multiprocessing.get_all_start_methods()
    default = "forkserver" if "forkserver" in methods else "spawn"
    return [default, *(method for method in methods if method != default)]


def _preload(method: str) -> None:
    """Let the fork server import what every worker needs, if it is not running yet.

    Eight workers are then ready in 0.04 s, else in 0.75 s.
    """
    server: Any = forkserver._forkserver
    if method == "forkserver" and server._preload_modules == ["__main__"]:  # else it is the user's own choice
        forkserver.set_forkserver_preload(_PRELOADED)


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Hide where the main module comes from, so that workers do not import it again.

    It need not be importable, nor guarded: what is needed of it travels by cloudpickle.
    """
    main = sys.modules["__main__"]
    _HIDDEN.update({name: main.__dict__[name] for name in ("__file__", "__spec__") if name in main.__dict__})
    main.__dict__.pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        _show_main()


@contextlib.contextmanager
def _deaf_to_interrupts(method: str) -> Iterator[None]:
    """Let processes that start meanwhile hear no Ctrl-C until they have said what they want of it.

    It goes to the whole process group, and would end a worker, or the fork server, that has not come so
    far yet as to ignore it.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    if method != "fork":
        resource_tracker.ensure_running()  # it would begin to hear again as it starts
    found = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, found)


@contextlib.contextmanager
def _sleepy_blas() -> Iterator[None]:
    """Let the idle threads of OpenBLAS sleep at once in the processes that start meanwhile.

    They are there as soon as `threadpoolctl` forbids them, and spin for 100 ms before they sleep. All the
    while a step of 16 CartPoles on 2 cores took 4 ms, a tick of the scheduler, instead of 0.14 ms.
    """
    if _BLAS_TIMEOUT in os.environ:  # the user has decided
        yield
        return
    os.environ[_BLAS_TIMEOUT] = "4"  # the logarithm of a number of cycles, and its smallest value
    try:
        yield
    finally:
        os.environ.pop(_BLAS_TIMEOUT, None)


def _show_main() -> None:
    sys.modules["__main__"].__dict__.update(_HIDDEN)
    _HIDDEN.clear()


def _begin_anew() -> None:
    """Let a forked child, born while its worker was being started, start workers itself."""
    global _STARTING  # noqa: PLW0603 (the parent's lock, locked by a thread that is not here, cannot be had)
    _STARTING = threading.Lock()
    _show_main()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
