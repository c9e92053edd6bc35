"""The forms in which a user may give an env, and how a host builds the env."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pickle
import pickletools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.utils import EzPickle

from parallelenv.contract.attributes import look_up
from parallelenv.contract.copying import dumps, loads, pickles
from parallelenv.contract.error_text import did_you_mean, hint_at_make_argument, show
from parallelenv.contract.interrupts import Ignore, signal_behind
from parallelenv.contract.spaces import Env
from parallelenv.contract.tracebacks import warn_user
from parallelenv.contract.worker_info import ProcessInfo
from parallelenv.errors import ArgumentError, InvalidEnvError, UnpicklableError

if TYPE_CHECKING:
    from parallelenv.contract.protocol import EnvFacts

_NO_ENVS = (gymnasium.Space, os.PathLike, Mapping, Sequence, Set)
"""Types with public methods whose instances are given as envs only by mistake."""
_ACCEPTED = "a Gymnasium env, an env fn (a callable without arguments that makes one), a registered id or an EnvSpec"

_MOST_OPCODES = 50_000
"""Maximum number of opcodes that are read to find modules, which takes about 40 ms.

In a pickle, a class comes before its content, so the modules of most classes are found.
"""
_START = pickle.PROTO + b"\x05" + pickle.FRAME
_ID = re.compile(r"[A-Za-z_][\w.]*:[\w/-]+-v\d+")  # as in ``gymnasium.make``: a module to import and an id


@dataclass(slots=True)
class EnvFactory:
    """Says how to get one env: ``source`` is the env itself, an env fn (maybe a `PackedSource`) or an `EnvSpec`."""

    env_id: int
    source: Any
    is_live: bool

    def prepare(self) -> None:
        """Import the modules that the env needs, without making the env."""
        if isinstance(self.source, EnvSpec) and isinstance(self.source.entry_point, str):
            load_env_creator(self.source.entry_point)
        elif isinstance(self.source, PackedSource) and not self.source.is_live:  # unpickling a live env makes it
            self.source.factory().prepare()

    def build(self) -> Env:
        """Return the env; raise an `InvalidEnvError` if an env fn returns something that is not an env."""
        if self.is_live:
            return self.source
        if isinstance(self.source, EnvSpec):
            return gymnasium.make(self.source)
        env = self.source()
        if not is_env(env) and not is_for_calls(env):
            raise InvalidEnvError(  # the same text for each env, so that these errors count as equal
                f"An env fn returned {show(env) if type(env).__module__ == 'builtins' else type(env).__name__}, which "
                "has no reset() and step(), nor other methods to call. It must return a new env."
            )
        refuse_foreign(env, self.env_id)
        return env


@dataclass(frozen=True, slots=True)
class PackedSource:
    """A picklable env fn that contains the pickle of an env or env fn. ``caller`` is the caller's `PackageVersion`."""

    packed: bytes
    env_id: int
    is_live: bool
    caller: Any

    def __call__(self) -> Env:
        """Return the env. See `EnvFactory.build`."""
        self.caller.check()
        return self.factory().build()

    def factory(self) -> EnvFactory:
        """Unpickle the source, and return a factory like the one in the caller's process."""
        return EnvFactory(self.env_id, loads(self.packed), self.is_live)


def make_factories(envs: Any) -> tuple[EnvFactory, ...]:
    """Return one factory per item of a user's list, in order; raise an error if ``envs`` is not a list of envs."""
    if isinstance(envs, (str, EnvSpec)) or is_env(envs) or callable(envs):
        what = "env fn" if callable(envs) and not is_env(envs) else "env"
        raise InvalidEnvError(f"envs={show(envs)} is a single {what}. {_as_list(envs)}")
    if isinstance(envs, (set, frozenset, Mapping)):
        raise ArgumentError(
            f"envs={show(envs)} is a {type(envs).__name__}, which does not define env ids. Give a list: the id of an "
            "env is its index."
        )
    try:
        items = list(envs)
    except TypeError:
        raise InvalidEnvError(f"envs={show(envs)} is not a list. Give a list; each item is {_ACCEPTED}.") from None
    if not items:
        raise InvalidEnvError(f"envs is empty. Give at least one of: {_ACCEPTED}.")
    factories = tuple(_factory(env_id, item) for env_id, item in enumerate(items))
    seen: dict[int, int] = {}
    for factory in factories:
        if not factory.is_live:
            continue
        first = seen.setdefault(identity(factory.source), factory.env_id)
        if first != factory.env_id:
            are = "are" if factories[first].source is factory.source else "are, or wrap,"
            raise InvalidEnvError(
                f"envs[{first}] and envs[{factory.env_id}] {are} the same instance, {show(factory.source)}. Two ids "
                "cannot share one env. Make one for each: [make() for _ in range(n)], or give env fns: [make] * n."
            )
    return factories


def _factory(env_id: int, item: object) -> EnvFactory:
    if isinstance(item, str):  # looked up in the caller's process, where the user may have registered it
        module, colon, name = item.rpartition(":")
        try:
            if colon:  # as in gymnasium.make, importing the module registers the env
                importlib.import_module(module)
            return EnvFactory(env_id, gymnasium.spec(name), is_live=False)
        except gymnasium.error.Error as error:
            raise InvalidEnvError(f"envs[{env_id}] is {item!r}, which Gymnasium does not know: {error}") from None
        except (ImportError, ValueError) as error:
            what = f"whose module {module!r} cannot be imported ({type(error).__name__}: {error})"
            raise InvalidEnvError(f"envs[{env_id}] is {item!r}, {what}.") from error
    if is_env(item):
        refuse_foreign(item, env_id)
        return EnvFactory(env_id, item, is_live=True)
    is_source = isinstance(item, EnvSpec) or callable(item)
    if not is_source and not is_for_calls(item):
        raise InvalidEnvError(f"envs[{env_id}] is {show(item)}, which is not an env. Give {_ACCEPTED}.")
    return EnvFactory(env_id, item, is_live=not is_source)


def _as_list(item: object) -> str:
    """Return a sentence that says how to pass a list instead of this single item."""
    if isinstance(item, (str, EnvSpec)):
        word = show(item) if isinstance(item, str) else "spec"
        return f"Give a list, [{word}] * n, or use ParallelEnv.make({word}, num_envs=n)."
    if is_env(item):
        return "Give ParallelEnv a list of envs: [make() for _ in range(n)]."
    if not callable(item):
        return f"Give ParallelEnv a list; each item is {_ACCEPTED}."
    name = getattr(item, "__name__", "")
    return f"Give ParallelEnv a list with one per env: [{name if name.isidentifier() else 'env_fn'}] * n."


def registered(
    id: object, make_kwargs: Mapping[str, object], own_arguments: Sequence[str], option_names: Sequence[str] = ()
) -> EnvSpec:
    """Return the spec of a registered id, for ``gymnasium.make``.

    Raises an `ArgumentError` if the env does not accept one of the user's ``make_kwargs`` and the message can say what
    the user probably meant.
    """
    if not isinstance(id, (str, EnvSpec)):
        raise InvalidEnvError(
            f"id={show(id)} is neither a registered id nor an EnvSpec. {_as_list(id)} Pass arguments of an env fn "
            "with functools.partial."
        )
    spec: EnvSpec = make_factories([id])[0].source
    for name, value in make_kwargs.items():
        hint = hint_at_make_argument(name) or did_you_mean(name, [*own_arguments, *option_names])
        if name in option_names:
            hint = f" It is an option of the mode: give it in backend_options={{{name!r}: {show(value)}}}."
        if not hint:
            continue
        try:  # only for suspect names, because it imports the env's module
            creator = spec.entry_point if callable(spec.entry_point) else load_env_creator(str(spec.entry_point))
            parameters = inspect.signature(creator).parameters.values()
        except (ImportError, AttributeError, TypeError, ValueError):  # unknown here; making the env may raise
            continue
        is_taken = any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)
        if name not in spec.kwargs and not is_taken:
            raise ArgumentError(f"{name}={show(value)} is not an argument of ParallelEnv.make() or of {spec.id}.{hint}")
    return spec


def pack_factories(factories: Sequence[EnvFactory]) -> list[bytes]:
    """Pickle each factory's source separately for another process, so that envs share no objects."""
    packed: dict[int, bytes] = {}  # an env fn that occurs many times is pickled once
    for factory in factories:
        source = factory.source
        if factory.is_live and _loses_state(source):
            warn_user(
                f"env {factory.env_id}, {show(source)}, was reset and then given to a worker process, but its class is "
                "an EzPickle: it travels as its constructor's arguments, so its state is lost. Reset it again, or give "
                "an env fn."
            )
        if id(source) in packed:
            continue
        try:
            packed[id(source)] = dumps(source)
        except Exception as error:  # pickling runs user code, which may raise anything
            if signal_behind(error) is not None:
                raise
            attributes = getattr(getattr(source, "unwrapped", source), "__dict__", {})
            guilty = [f"{name} ({type(value).__name__})" for name, value in attributes.items() if not pickles(value)]
            blame = f"These cannot be pickled: {', '.join(guilty)}. " if guilty else ""
            raise UnpicklableError(
                f"env {factory.env_id} cannot move to its worker: its {'instance' if factory.is_live else 'env fn'} "
                f"{show(source)} cannot be pickled ({type(error).__name__}: {error}). "
                f"{blame}Give an env fn that makes such objects where it runs, or use para_mode='dummy' or 'thread'."
            ) from error
    return [packed[id(factory.source)] for factory in factories]


def _loses_state(env: object) -> bool:
    """Return whether an env has been reset and would lose its state if pickled, because it is an `EzPickle`."""
    base, layer = getattr(env, "unwrapped", env), env
    if is_vector_env(env):
        return any(map(_loses_state, getattr(base, "envs", ())))
    if not isinstance(base, EzPickle):
        return False
    while layer is not None and getattr(layer, "_has_reset", False) is not True:
        layer = getattr(layer, "env", None)
    return layer is not None or getattr(base, "_np_random", None) is not None


def modules_of(packed: Iterable[bytes]) -> list[str]:
    """Return the modules that pickles of envs and env fns refer to, without duplicates.

    They include the modules of envs whose registered ids occur in the pickles.
    """
    found: dict[str, None] = {}
    left = iter(range(_MOST_OPCODES))
    waiting = list(dict.fromkeys(packed))
    for one in waiting:  # grows in the loop
        memo: list[Any] = []
        latest: tuple[Any, object] = (None, None)  # each a string, a pair of module and name, or None
        for (opcode, value, _), _ in zip(pickletools.genops(one), left, strict=False):
            top: Any = value if isinstance(value, str) else None
            if opcode.name in ("PROTO", "FRAME", "MEMOIZE"):
                memo += [latest[1]] if opcode.name == "MEMOIZE" else []
                continue
            if opcode.name in ("BINGET", "LONG_BINGET"):
                top = memo[int(value or 0)]
            elif opcode.name == "STACK_GLOBAL":
                top = latest
                found[latest[0]] = None
            elif isinstance(value, bytes) and value.startswith(_START) and value.endswith(pickle.STOP):
                waiting.append(value)  # a pickle in a pickle, such as the envs that an actor sends to its workers
            elif top is not None:
                if latest[1] == ("cloudpickle.cloudpickle", "subimport"):
                    found[top] = None
                found.update(dict.fromkeys(_modules_of_id(top)))
            latest = latest[1], top
    return [module for module in found if module not in ("__main__", "builtins")]


def _modules_of_id(text: str) -> list[str]:
    """Return the modules that ``gymnasium.make`` would import for ``text``; none if ``text`` is not an id."""
    module, colon, name = text.rpartition(":")
    spec = gymnasium.registry.get(name)
    modules = [module] if colon and (spec is not None or _ID.fullmatch(text)) else []
    entry: Any = getattr(spec, "entry_point", None)
    if isinstance(entry, str) or callable(entry):
        modules.append(entry.partition(":")[0] if isinstance(entry, str) else entry.__module__)
    return modules


def is_env(candidate: object) -> bool:
    """Return whether an object can be used as an env: it must be an instance with ``reset`` and ``step`` methods."""
    return not isinstance(candidate, type) and all(callable(look_up(candidate, name)) for name in ("reset", "step"))


def layers(env: Env) -> Iterator[Env]:
    """Yield an env's wrappers from the outermost inwards, then the env itself."""
    seen: set[int] = set()  # an env may name itself: `self.env = self`
    while id(env) not in seen:
        seen.add(id(env))
        yield env
        inner = look_up(env, "env", None)
        if inner is None or not is_env(inner):
            return
        env = inner


def identity(env: Env) -> int:
    """Return the `id` of the env inside all wrappers: two items with the same one would step the same env."""
    *_, base = layers(env) if is_env(env) else (env,)
    return id(base)


def is_for_calls(candidate: object) -> bool:
    """Return whether an object that is not an env can be used in place of one, for method calls only."""
    kind = type(candidate)
    if kind.__module__ == "builtins" or isinstance(candidate, _NO_ENVS) or hasattr(kind, "__array__"):
        return False
    return any(not name.startswith("_") and callable(getattr(kind, name, None)) for name in dir(kind))


def is_vector_env(env: object) -> bool:
    """Return whether an env is a Gymnasium vector env."""
    return isinstance(env, gymnasium.vector.VectorEnv)


def refuse_foreign(env: object, env_id: int) -> None:
    """Raise an `InvalidEnvError` for closed vector envs, PettingZoo envs, and EnvPool envs without Gymnasium's API."""
    if any(kind.__module__.partition(".")[0] == "pettingzoo" for kind in type(env).__mro__):
        raise InvalidEnvError(
            f"env {env_id} is {show(env)}, a PettingZoo multi-agent env. ParallelEnv runs single-agent envs side by "
            "side and is not PettingZoo's ParallelEnv. Wrap it in a gymnasium.Env first."
        )
    if hasattr(env, "all_env_ids") and hasattr(env, "async_reset") and not is_vector_env(env):
        raise InvalidEnvError(f"env {env_id} is {show(env)}, an EnvPool env. Make it with envpool.make_gymnasium().")
    if is_vector_env(env) and env.closed:  # type: ignore[attr-defined]
        raise InvalidEnvError(
            f"env {env_id} is {show(env)}, a vector env that is closed. Give a new one, or an env fn."
        )


def refuse_shared(facts: Mapping[int, EnvFacts]) -> None:
    """Raise an `InvalidEnvError` if two env fns returned, or wrapped, the same env in the same process."""
    seen: dict[tuple[ProcessInfo, int], int] = {}
    for env_id, one in sorted(facts.items()):
        first = seen.setdefault((one.process, one.instance), env_id)
        if first != env_id:
            raise InvalidEnvError(
                f"The env fns of envs {first} and {env_id} returned the same instance, perhaps in different wrappers. "
                "Two ids cannot share one env: "
                "an env fn must make a new one each time. Functions made in a loop all see its last value: use "
                "functools.partial(make, value)."
            )


def refuse_live(factories: Iterable[EnvFactory]) -> None:
    """Raise an `InvalidEnvError` if an env was given as a live instance, which cannot be made again."""
    for factory in factories:
        if factory.is_live:
            what = f"env {factory.env_id} was given as a live instance, which cannot be rebuilt in this process"
            raise InvalidEnvError(f"{what}. Give an env fn instead.")


def registered_by_user() -> dict[str, bytes]:
    """Return, by id, the pickled specs that were registered in addition to Gymnasium's own.

    Specs that cannot be pickled are left out.
    """
    packed = {}
    for name, spec in gymnasium.registry.items():
        if not str(spec.entry_point).startswith("gymnasium.envs."):
            with Ignore(Exception):  # pickling runs user code
                packed[name] = dumps(spec)
    return packed


def register_again(specs: Mapping[str, bytes]) -> None:
    """Register those of the caller's specs whose ids are unknown in this process.

    Specs that cannot be unpickled are left out.
    """
    for name, packed in specs.items():
        if name not in gymnasium.registry:
            with Ignore(Exception):  # unpickling runs user code
                gymnasium.registry[name] = loads(packed)


EnvFn = Callable[[], Env]


def replicate(env: object, num_envs: int, seed: int | None) -> list[EnvFn]:
    """Return one env fn for each copy of the env. See `ParallelEnv.replicate`."""
    factory = make_factories([env])[0]
    if factory.is_live:
        return [functools.partial(loads, pack_factories([factory])[0])] * num_envs
    if isinstance(factory.source, EnvSpec):
        return [functools.partial(gymnasium.make, factory.source)] * num_envs
    return [bind_arguments(factory.source, rank, num_envs, seed) for rank in range(num_envs)]


def bind_arguments(env_fn: Callable[..., Env], rank: int, num_envs: int, seed: int | None) -> EnvFn:
    """Return ``env_fn`` with values for its parameters ``rank``, ``world_size`` and ``seed``, if it has them."""
    known = {"rank": rank, "world_size": num_envs, "seed": None if seed is None else seed + rank}
    bound = env_fn.keywords if isinstance(env_fn, functools.partial) else {}
    try:
        parameters = inspect.signature(env_fn).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return env_fn
    wanted = {
        name: known[name]
        for name, one in parameters.items()
        if name in known.keys() - bound
        and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        and (known[name] is not None or one.default is one.empty)
    }
    return functools.partial(env_fn, **wanted) if wanted else env_fn
