"""Checks arguments and attribute names, gives each env its part of an argument, and writes actions to the batch."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, TypeGuard

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector.utils import batch_space, iterate

from parallelenv.contract.batch import NOTHING_SHARED, Array, Batch, Layout, Rows
from parallelenv.contract.copying import graph_parts
from parallelenv.contract.error_text import SET_ONCE, count, hint_at_make_argument, near_attribute, show, were
from parallelenv.contract.spaces import Action, Space, casts_to, describe_value
from parallelenv.contract.tensors import as_array, is_tensor
from parallelenv.errors import AbsentAttributeError, ActionError, ArgumentError, IdRangeError, WorkerStartError

if TYPE_CHECKING:
    from parallelenv.contract.protocol import Backend


Ids: TypeAlias = "SupportsIndex | Sequence[SupportsIndex] | slice | Array | None"
"""One env id, several ids, a slice, a bool mask with one item per env, or ``None`` for all unpaused envs."""
Seeds = SupportsIndex | Sequence[SupportsIndex | None] | None
"""A seed ``s``, from which env i gets ``s + i``, or a list with one seed per env."""
Options = Mapping[str, object] | Sequence[Mapping[str, object] | None] | None
"""Options of a reset: a dict for all envs, or a list with one dict per env."""
Policy = Callable[..., Any]
"""A function from states to actions."""

_LONGEST = 1e8
"""The longest timeout, in seconds (three years). The system's waiting functions overflow at about 1e10 seconds."""
MISSING: Any = type("MISSING", (), {"__repr__": lambda self: "<not given>"})()
"""Default of arguments for which ``None`` is a valid value."""


def check_counts(num_cpus: object, num_gpus: object) -> int | None:
    """Return ``num_cpus``, or ``None`` (all cores) if it is ``None`` or 0; raise if either argument is invalid."""
    if not is_number(num_gpus) or not 0 <= num_gpus < math.inf:
        raise ArgumentError(f"num_gpus={show(num_gpus)} is not a number of GPUs. Give 0 or more; it may be a fraction.")
    return None if num_cpus is None or (is_int(num_cpus) and num_cpus == 0) else check_positive("num_cpus", num_cpus)


def check_flags(**flags: object) -> None:
    """Raise unless each flag is a bool, because a string, even "no", would count as true."""
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ArgumentError(f"{name}={show(value)} must be True or False.")


def check_positive(name: str, value: object) -> int:
    """Return ``value``; raise unless it is an int of at least 1."""
    if not is_int(value) or value < 1:
        raise ArgumentError(f"{name}={show(value)} must be an int of at least 1.")
    return value


def check_timeout(timeout: object) -> float | None:
    """Return a timeout in seconds, or ``None`` for no limit."""
    if timeout is None:
        return None
    if not is_number(timeout) or not timeout > 0:
        raise ArgumentError(f"timeout={show(timeout)} must be a positive number of seconds, or None to wait for ever.")
    return None if timeout == math.inf else min(float(timeout), _LONGEST)


def check_grace(timeout: object, default: float) -> float:
    """Return how many seconds workers may take to close their envs; a ``timeout`` of ``None`` means ``default``."""
    if timeout is None:
        return default
    if not is_number(timeout) or not timeout >= 0:
        what = f"timeout={show(timeout)} must be a number of seconds, 0 or more, or None for {default:g} s"
        raise ArgumentError(f"{what}. Nothing was closed.")
    return min(float(timeout), _LONGEST)


def check_failure_handling(on_failure: object, max_restarts: object) -> None:
    """Raise if ``on_failure`` is unknown or ``max_restarts`` is not an int of at least 1."""
    if on_failure not in ("raise", "restart"):
        ways = "'raise' (the call raises) or 'restart' (the env is rebuilt and counts as cut off)"
        raise ArgumentError(f"on_failure={show(on_failure)} is not known; expected {ways}.")
    check_positive("max_restarts", max_restarts)


def check_spaces(spaces: object) -> tuple[Space, Space] | None:
    """Return copies of an observation space and an action space, or ``None`` if no spaces are given."""
    if spaces is None:
        return None
    pair: tuple[Any, ...] = spaces if isinstance(spaces, tuple) else ()
    # `Space` itself is abstract: it has no values.
    are_spaces = all(isinstance(one, gymnasium.Space) and type(one) is not gymnasium.Space for one in pair)
    if len(pair) != 2 or not are_spaces:
        raise ArgumentError(
            f"spaces={show(spaces)} is not a pair of spaces. Give (observation_space, action_space) of one env, a "
            "tuple of two Gymnasium spaces, or leave it out to use each env's own."
        )
    return copy.deepcopy(pair[0]), copy.deepcopy(pair[1])


def check_align(align: object) -> None:
    """Raise unless ``align`` is ``"item"`` or ``"batch"``."""
    if align not in ("item", "batch"):
        ways = "'item' (four batched items) or 'batch' (one tuple per env)"
        raise ArgumentError(f"align={show(align)} is not known; expected {ways}.")


def check_window(min_envs: object, max_envs: object) -> None:
    """Raise unless both arguments are valid for `ParallelEnv.recv`."""
    least = check_positive("min_envs", min_envs)
    if max_envs is not None and check_positive("max_envs", max_envs) < least:
        raise ArgumentError(f"max_envs={max_envs} is less than min_envs={min_envs}. Give at least as many.")


def check_policy(policy: object) -> None:
    """Raise if a policy is not callable."""
    if not callable(policy):
        raise ArgumentError(
            f"policy is a {type(policy).__name__}, which cannot be called. Give a function or an object that takes the "
            "states of some envs and returns an action for each."
        )


def check_name(argument: str, name: object) -> None:
    """Raise unless ``name`` is one or more identifiers joined by dots, none of them a double-underscore name."""
    parts = name.split(".") if isinstance(name, str) else [""]
    if not all(map(str.isidentifier, parts)):
        way_out = "Give a name like 'x' or 'part.x'; it is looked up, never evaluated."
        raise ArgumentError(f"{argument}={name!r} is not a valid name. {way_out}")
    if any(part.startswith("__") and part.endswith("__") for part in parts):
        raise ArgumentError(f"{argument}={name!r} contains a double-underscore name, which cannot be accessed.")


def absent_attribute(owner: object, name: str, purpose: str = "", default: str = "") -> AbsentAttributeError:
    """Return the error for an attribute that ``owner`` does not have."""
    ways = f"If the envs have it: customized_method({name!r}) calls theirs, get_env_attr({name!r}) returns it."
    hint = hint_at_make_argument(name) or f"{near_attribute(name, type(owner))} {default or ways}"
    message = f"{type(owner).__name__} has no attribute {name!r}{purpose}.{hint}"
    return AbsentAttributeError(message, name=name)  # with `obj`, Python 3.12 also adds a hint


def unsettable_attribute(owner: object, name: str, is_argument: bool) -> AbsentAttributeError:
    """Return the error for an attribute that cannot be set."""
    if hasattr(type(owner), name) and not (is_argument or hint_at_make_argument(name)):
        return AbsentAttributeError(f"{type(owner).__name__}.{name} is read-only.", name=name)
    default = f"If the envs have it, set_env_attr({name!r}, value) sets theirs."
    return absent_attribute(owner, name, " to set", SET_ONCE.format(name) if is_argument else default)


def spread_seeds(seed: object, env_ids: Sequence[int], *, whole: bool) -> list[int | None]:
    """Return one seed per env: ``seed + env_id`` for an int, or the items of a list.

    If ``whole`` is ``False``, ``seed`` may be ``None``, in which case no env gets a seed.
    """
    if seed is None and not whole:
        return [None] * len(env_ids)
    if is_int(seed):
        return [_check_seed(seed) + env_id for env_id in env_ids]
    if not _is_sequence(seed):
        raise ArgumentError(f"seed={show(seed)} is not a seed. Give an int, or a list with one int or None per env.")
    if len(seed) != len(env_ids):
        what = f"{were(len(seed), 'seed')} given for {count(len(env_ids), 'env')}"
        raise ArgumentError(f"{what}. Give one each, or an int for all.")
    return [None if item is None else _check_seed(item) for item in seed]


def check_base_seed(seed: object) -> int | None:
    """Return ``seed``, from which the seeds of all envs are derived; raise unless it is ``None`` or a valid seed."""
    if seed is not None and not is_int(seed):
        raise ArgumentError(f"seed={show(seed)} is not an int. Env i gets seed + i; for other seeds call seed([...]).")
    return None if seed is None else _check_seed(seed)


def _check_seed(seed: object) -> int:
    if not is_int(seed) or seed < 0:
        raise ArgumentError(f"seed={show(seed)} is not a seed. Seeds are ints of 0 or more.")
    return int(seed)


def spread_options(options: object, env_ids: Sequence[int]) -> list[dict[str, object] | None]:
    """Return the reset options of each env."""
    expected = "a dict for all envs, or a list with one dict or None per env"
    return _spread("options", options, env_ids, lambda one: isinstance(one, (dict, type(None))), expected)


def spread_data(data: object, env_ids: Sequence[int]) -> list[dict[str, object]] | None:
    """Return one dict of keyword arguments per env, or ``None`` if ``data`` is ``None``."""
    expected = (
        "a dict of keyword arguments, by name, for all envs, or a list with one dict per env; envs are chosen with id="
    )
    return None if data is None else _spread("data", data, env_ids, _has_keywords, expected)


def spread_names(argument: str, names: object, env_ids: Sequence[int]) -> list[str]:
    """Return the attribute or method name for each env."""
    expected = "a name for all envs, or a list with one per env"
    spread: list[str] = _spread(argument, names, env_ids, lambda one: isinstance(one, str), expected)
    for name in spread:
        check_name(argument, name)
    return spread


def spread_arguments(each: object, env_ids: Sequence[int]) -> list[tuple[tuple[object, ...], dict[str, object]]]:
    """Return the positional and keyword arguments for each env's method."""
    expected = "a list or tuple of positional arguments, a dict of keyword arguments, or None"
    each = [None] * len(env_ids) if each is None else each
    items = _check_list("function_args_list", each, env_ids, f"a list with one item per env, {expected}")
    for one in items:
        if not _has_keywords(one) and not isinstance(one, (list, tuple, type(None))):
            raise ArgumentError(f"function_args_list contains {show(one)}. Each item must be {expected}.")
    return [((), one) if isinstance(one, dict) else (tuple(one or ()), {}) for one in items]


def _has_keywords(arguments: object) -> bool:
    return isinstance(arguments, dict) and all(isinstance(name, str) for name in arguments)


def _spread(
    name: str, given: object, env_ids: Sequence[int], is_item: Callable[[object], bool], expected: str
) -> list[Any]:
    if is_item(given):
        return [given] * len(env_ids)
    items = _check_list(name, given, env_ids, expected)
    for item in items:
        if not is_item(item):
            raise ArgumentError(f"{name} contains {show(item)}. Give {expected}.")
    return items


def spread_values(value: object, values: object, env_ids: Sequence[int]) -> list[Any]:
    """Return the value to set on each env."""
    if (value is MISSING) == (values is None):
        raise ArgumentError("Give set_env_attr either value (the same for every env) or values=[...] (one per env).")
    if values is not None:
        return _check_list("values", values, env_ids, "a list with one value per env")
    envs = count(len(env_ids), "env")
    ways = "Give values=[...] with one item per env, or values=[value] * n to set the same on all."
    if isinstance(value, (list, tuple)):
        if len(value) != len(env_ids):
            raise ArgumentError(
                f"value is a {type(value).__name__} of {count(len(value), 'item')} for {envs}. A list or tuple has one "
                f"item per env, in the order of id. {ways}"
            )
        return list(value)
    shape = getattr(value, "shape", ())
    if len(env_ids) > 1 and isinstance(shape, tuple) and shape[:1] == (len(env_ids),):
        what = describe_value(value)
        raise ArgumentError(f"value is {what} for {envs}: one row for each, or all of it for each? {ways}")
    return [value] * len(env_ids)


def _check_list(name: str, items: object, env_ids: Sequence[int], expected: str) -> list[Any]:
    if not _is_sequence(items):
        raise ArgumentError(f"{name}={show(items)} cannot be spread over envs. Give {expected}.")
    if len(items) != len(env_ids):
        what = f"{name} has {count(len(items), 'item')} for {count(len(env_ids), 'env')}"
        raise ArgumentError(f"{what}. Give {expected}, in the order of id.")
    return list(items)


def _is_sequence(items: object) -> TypeGuard[Sequence[object]]:
    has_items = hasattr(items, "__len__") and getattr(items, "ndim", 1) > 0
    return has_items and not isinstance(items, (str, bytes, dict, set))


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a Python or NumPy real number, but not a bool."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def parse_ids(argument: Any, num_envs: int, name: str = "id") -> tuple[int, ...]:
    """Return the env ids that an ``id`` argument names, in the order given."""
    if isinstance(argument, slice):
        try:
            return tuple(range(*argument.indices(num_envs)))
        except (TypeError, ValueError) as error:
            raise ArgumentError(f"{name}={show(argument)} is not a valid slice: {error}.") from None
    forms = "Give an int, a list, tuple or array of ints, a slice, or a bool mask."
    given = argument.tolist() if hasattr(argument, "tolist") else argument
    given = [given] if is_int(given) else given
    if isinstance(given, (str, bytes, dict, set, frozenset)) or not isinstance(given, Iterable):
        raise ArgumentError(f"{name}={show(argument)} names no envs. {forms}")
    items = list(given)
    if set(map(type, items)) != {int}:  # not the usual case
        if items and all(isinstance(item, (bool, np.bool_)) for item in items):
            if len(items) != num_envs:
                raise ArgumentError(
                    f"{name} is a mask of length {len(items)}, but there are {num_envs} envs. Give one bool per env."
                )
            items = np.flatnonzero(items).tolist()
        if wrong := [item for item in items if not is_int(item)]:
            raise ArgumentError(f"{name}={show(argument)} contains {show(wrong[0])}, which is not an int. {forms}")
    env_ids = tuple(map(int, items))
    if outside := [env_id for env_id in env_ids if not 0 <= env_id < num_envs]:
        raise IdRangeError(f"{name}={show(argument)} names env {outside[0]}, but ids run from 0 to {num_envs - 1}.")
    if len(set(env_ids)) != len(env_ids):
        twice = next(env_id for env_id in env_ids if env_ids.count(env_id) > 1)
        raise ArgumentError(f"{name}={show(argument)} names env {twice} twice. Name each env once.")
    return env_ids


def is_int(value: object) -> TypeGuard[int]:
    """Return whether a value is a Python or NumPy int, but not a bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_shared(shared: object) -> Mapping[str, Array]:
    """Return the user's arrays; raise an `ArgumentError` unless ``shared`` is ``None`` or a dict of plain arrays."""
    if shared is None:
        return NOTHING_SHARED
    if not isinstance(shared, Mapping):
        raise ArgumentError(f"shared is a {type(shared).__name__}. Give a dict of numpy arrays, {{'name': array}}.")
    for name, array in shared.items():
        if not isinstance(name, str):
            raise ArgumentError(f"shared has the name {name!r}, which is not a str.")
        what = f"a {type(array).__name__}"
        if isinstance(array, np.ma.MaskedArray):
            way_out = "Give array.data and array.mask as two arrays."
            raise ArgumentError(f"shared[{name!r}] is {what}, whose mask would be left out. {way_out}")
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            what = f"an array of {array.dtype}" if isinstance(array, np.ndarray) else what
            raise ArgumentError(
                f"shared[{name!r}] is {what}. Shared values are numpy arrays of numbers, bools or fixed-length "
                "strings; put anything else into the env fns."
            )
    return dict(shared)


def refuse_masked(what: str, kinds: Iterable[type], error: type[ArgumentError] = ActionError) -> None:
    """Raise if a value of one of these types is a masked array: its copy in a plain array would lose the mask."""
    if any(issubclass(kind, np.ma.MaskedArray) for kind in kinds):
        raise error(f"{what} is a MaskedArray, whose mask would be left out. Give a plain array: array.filled(0).")


def share(backend: Backend, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
    """Store arrays with `Backend.share` and return its result."""
    try:
        return backend.share(arrays)
    except MemoryError as error:
        nbytes = sum(array.nbytes for array in arrays.values())
        raise WorkerStartError(
            f"shared= needs {nbytes:,} bytes of memory, which are not available. Share less."
        ) from error


class ActionReader:
    """Converts the user's actions to rows of the batch, or to one object per env.

    Args:
        order: Text for error messages that says which envs need an action, and in which order.
        keeps_graphs: ``True``: an action that requires gradients reaches its env with its graph. ``False``: such an
            action is rejected. ``None``: gradients are dropped.
        as_given: If ``True``, actions of a `Box` keep their own dtype instead of getting the dtype of the space, and
            whole numbers given as floats are accepted where ints are needed.
    """

    def __init__(
        self,
        layout: Layout,
        order: str = "env that steps, in the order of id; without id, one for each env that is not paused",
        keeps_graphs: bool | None = None,
        as_given: bool = False,
    ) -> None:
        self._order, self._keeps_graphs, self._as_given = order, keeps_graphs, as_given
        self._structure, self._space, self._fields = layout.actions, layout.action_space, layout.action_fields
        self._only = self._fields[0] if self._structure.is_single and self._fields else None
        self._takes_ints = self._only is not None and self._only.shape == () and self._only.dtype == np.int64

    def write(
        self, batch: Batch, action: Action, env_ids: Sequence[int], stepped: Sequence[int], chosen: Sequence[int] | None
    ) -> list[Action] | None:
        """Write actions to the batch, in the rows of the envs that will step.

        Only the envs in ``stepped`` will step; ``chosen`` contains their positions in ``env_ids`` (``None`` means all).
        The actions of the remaining envs are counted but not read.

        The result is usually ``None``. If the rows of the batch cannot hold the actions, because the actions have no
        fixed shape and dtype, require gradients or keep a dtype of their own, the result is a list with one action per
        env that will step. In that case, or if an `ActionError` is raised, nothing is written.
        """
        only = self._only
        if (
            only is not None
            and chosen is None
            and type(action) is np.ndarray
            and action.dtype == only.dtype
            and action.shape == (len(env_ids), *only.shape)
        ):  # the usual case, without further checks: 0.4 us instead of 4 us
            batch.actions[0][batch.rows(stepped)] = action
            return None
        is_list = type(action) is list and chosen is None and len(action) == len(env_ids)
        if self._takes_ints and is_list and set(map(type, action)) == {int}:  # 2 us instead of 12 us
            with contextlib.suppress(OverflowError):
                batch.actions[0][batch.rows(stepped)] = action
                return None
        parts = [] if self._keeps_graphs is None else graph_parts(action)
        if parts and not self._keeps_graphs:
            is_module = not is_tensor(parts[0])
            what = f"{type(parts[0]).__name__}, a module" if is_module else f"a tensor {describe_value(parts[0])}"
            raise ActionError(
                f"action contains {what} that requires grad, but in this mode actions are copied to another process, "
                "and gradients do not come back from there. Pass tensor.detach(), or step under torch.no_grad(); or "
                "use para_mode='dummy' or 'thread', where actions reach the envs with their graph."
            )
        if parts or not self._fields:
            return self._listed(action, env_ids, chosen)
        rows = self._rows(action, env_ids, chosen)
        if self._as_given and any(row.dtype != field.dtype for row, field in zip(rows, self._fields, strict=True)):
            return [self._structure.join(leaves) for leaves in zip(*rows, strict=True)]
        batch.put_actions(stepped, rows)
        return None

    def _rows(self, action: Action, env_ids: Sequence[int], chosen: Sequence[int] | None) -> Rows:
        if self._structure.is_single:
            is_batch = hasattr(action, "__array__") and getattr(getattr(action, "dtype", None), "kind", "") != "O"
        else:
            is_batch = isinstance(action, (dict, tuple))
        if is_batch:
            way_out = " Give a batch as action_space.sample() does, or a list with one action per env."
            leaves = self._split(action, "The batched action", way_out)
            for index, leaf in enumerate(leaves):
                refuse_masked(f"action{self._structure.describe(index)}", [type(leaf)])
                self._check_count(leaf, env_ids)
            if chosen is not None:
                leaves = [as_array(leaf)[list(chosen)] for leaf in leaves]
        else:
            leaves = [self._listed(action, env_ids, chosen)]
            if not self._structure.is_single:
                split = [self._split(one, "An action") for one in leaves[0]]
                leaves = [[parts[index] for parts in split] for index in range(len(self._fields))]
        num_rows = len(env_ids) if chosen is None else len(chosen)
        return [self._checked(index, leaf, num_rows) for index, leaf in enumerate(leaves)]

    def _listed(self, action: Action, env_ids: Sequence[int], chosen: Sequence[int] | None) -> list[Any]:
        if isinstance(action, (dict, tuple)) and self._space is not None and not self._structure.is_single:
            try:
                action = list(iterate(batch_space(self._space, 1), action))
            except (LookupError, TypeError, ValueError) as error:
                raise ActionError(f"The batched action does not fit {self._space}: {error}.") from None
        if isinstance(action, (Mapping, Set, str, bytes)):
            what = f"action is a {type(action).__name__}, which is not a batch of actions"
            raise ActionError(f"{what}. Give a list or an array.")
        self._check_count(action, env_ids)
        # The rows of a tensor are views. Autograd does not allow them to be changed in place, and a copy or a pickle of
        # one of them would contain the whole tensor.
        listed = [row.clone() for row in action] if is_tensor(action) else list(action)
        return listed if chosen is None else [listed[position] for position in chosen]

    def _split(self, action: Action, what: str, way_out: str = "") -> list[Any]:
        try:
            return self._structure.split(action)
        except (LookupError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ActionError(f"{what} lacks a part of {self._space}: {reason}.{way_out}") from None

    def _check_count(self, action: Action, env_ids: Sequence[int]) -> None:
        try:
            given = len(action)
        except TypeError:
            raise ActionError(
                f"action={show(action)} is a single action, but actions are given as a batch: one for each of the "
                f"envs that step, {len(env_ids)} here. For one env write [action]."
            ) from None
        if given != len(env_ids):
            what = f"{were(given, 'action')} given for {count(len(env_ids), 'env')}"
            raise ActionError(f"{what}. Give one per {self._order}.")

    def _checked(self, index: int, leaf: object, count: int) -> Array:
        field, space, where = self._fields[index], self._structure.leaves[index], self._structure.describe(index)
        refuse_masked(f"action{where}", set(map(type, leaf if isinstance(leaf, list) else ())))
        try:
            array: Array = as_array(leaf) if count else np.zeros((0, *field.shape), dtype=bool)
        except ValueError as error:
            text = f"The actions do not form an array: {error}. Each must have shape {field.shape}."
            raise ActionError(text) from None
        if array.shape != (count, *field.shape):
            expected = f"expected {(count, *field.shape)}: one row per env, each in {space}"
            raise ActionError(f"action{where} has shape {array.shape}; {expected}.")
        if self._as_given and array.dtype.kind in "biuf":
            if isinstance(space, Box):
                return array
            with np.errstate(invalid="ignore"):  # casting nan warns
                ints = array.astype(field.dtype)
            array = ints if (ints == array).all() else array  # whole numbers
        if not casts_to(array, field.dtype):
            are_numbers = array.dtype.kind in "biufc"
            way_out = f" Convert them: numpy.asarray(action).astype({str(field.dtype)!r})." if are_numbers else ""
            raise ActionError(
                f"action{where} has dtype {array.dtype}, which does not become {field.dtype} without loss of meaning. "
                f"Each action must be in {space}.{way_out}"
            )
        return array
