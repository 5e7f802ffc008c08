"""Functions and classes that were given in Python, as bytes for the reward workers.

They go through cloudpickle: by reference where they can be imported, by value, with the variables
that they use, where they belong to a notebook, a script or another function. The workers never run
the `__main__` of the trainer, and have no JAX.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import io
import pickle
import sys
import types
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from fp8rl_jax.errors import UserError
from fp8rl_jax.functions import PYTHON_OBJECT, describe_fault
from fp8rl_jax.tasks.python_objects import unwrapped

LARGEST = 256 * 2**20
"""Bytes that the functions may have with all the variables that they use: every worker gets a
copy."""


def pack(objects: Mapping[str, Any]) -> bytes:
    """Pickle the objects for the reward workers.

    Functions of one module or cell share their variables there, too.

    Raises:
        UserError: one of them, or a variable that it uses, cannot be sent; or they are larger than
            LARGEST.
    """
    if not objects:
        return b""
    with _modules_by_value(objects):
        return _pack(objects)


def _pack(objects: Mapping[str, Any]) -> bytes:
    try:
        packed = _pickled(dict(objects))
    except Exception as fault:
        for spec, value in objects.items():
            if culprit := _culprit(value, set()):
                raise UserError(
                    f"{_title(spec)} cannot be sent to the reward workers: {_why(*culprit)}"
                ) from fault
        raise UserError(
            f"reward: {', '.join(objects)} cannot be sent to the reward workers "
            f"({describe_fault(fault)})"
        ) from fault
    if len(packed) > LARGEST:
        spec, path, size = max(_sizes(objects), key=lambda row: row[2])
        raise UserError(
            f"{_title(spec)} cannot be sent to the reward workers: with the variables that it "
            f"uses it has {len(packed) >> 20} MiB"
            f"{f', {size >> 20} of them in {path!r}' if path else ''}, and each worker gets a "
            f"copy, of {LARGEST >> 20} MiB at "
            "most; load large things from a file inside the function"
        )
    return packed


def _title(spec: str) -> str:
    return f"{spec.removeprefix(f'{PYTHON_OBJECT}:')!r}, given in Python,"


@contextlib.contextmanager
def _modules_by_value(objects: Mapping[str, Any]) -> Generator[None]:
    """Within it, objects of modules that a worker could not import, or would find elsewhere, are
    pickled by value."""
    import cloudpickle

    names = {getattr(unwrapped(value), "__module__", None) for value in objects.values()} - {
        "__main__",
        *cloudpickle.list_registry_pickle_by_value(),
    }
    modules = [
        sys.modules[name] for name in names if name in sys.modules and not _is_importable(name)
    ]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _is_importable(name: str) -> bool:
    """Whether a new process, with this one's path, finds the package of module `name` where this
    one has it from."""
    package = name.partition(".")[0]
    module = next(
        (spec for finder in sys.meta_path if (spec := finder.find_spec(package, None))), None
    )
    return module is not None and module.origin in (
        "built-in",
        "frozen",
        getattr(sys.modules.get(package), "__file__", None),
    )


class _JaxObject(Exception):
    """A value that only a process with JAX has."""


@functools.cache
def _pickler() -> type[pickle.Pickler]:
    import cloudpickle  # here, because a run that is given no Python objects needs none

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            # Pickles of JAX's arrays exist, and load JAX into every worker. A jitted function is no
            # plain function.
            if _is_of_jax(value):
                raise _JaxObject
            return super().reducer_override(value)

    return Pickler


def _is_of_jax(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in ("jax", "jaxlib")


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _pickler()(buffer).dump(value)
    return buffer.getvalue()


def _culprit(value: Any, visited: set[int]) -> tuple[list[str], Exception] | None:
    """(names that lead to the innermost variable that cannot be sent, why not); None where `value`
    can be sent."""
    if id(value) in visited:
        return None
    visited.add(id(value))
    try:
        _pickled(value)
        return None
    except Exception as fault:
        for name, part in () if _is_of_jax(value) else _variables(value):
            if culprit := _culprit(part, visited):
                return [name, *culprit[0]], culprit[1]
        return [], fault


def _why(path: list[str], fault: Exception) -> str:
    variable = ".".join(path)
    owner = f"its variable {variable!r}" if path else "it"
    if isinstance(fault, _JaxObject):
        return (
            f"{owner} is or holds an object of JAX's (an array, a jitted function), and the "
            "workers have no JAX; give it "
            f"{f'numpy.asarray({variable})' if path else 'a plain function'} instead"
        )
    text = " ".join(f"{type(fault).__name__}: {fault}".split())
    return f"{owner} cannot be pickled ({text[:160]}); make it inside the function"


def _sizes(objects: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """(spec, name of one variable that it uses, its size as a pickle)."""
    for spec, value in objects.items():
        yield spec, "", 0
        for name, part in _variables(value):
            yield spec, name, len(_pickled(part))


def _variables(value: Any) -> Iterator[tuple[str, Any]]:
    """What a function, a class, or an object that is called like one brings along, by name."""
    if isinstance(value, functools.partial):
        yield from _variables(value.func)
        yield from ((f"argument {i}", argument) for i, argument in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
    elif isinstance(value, staticmethod | classmethod):
        yield from _variables(value.__func__)
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if cell != types.CellType():  # an empty cell: a variable that is set later
                yield name, cell.cell_contents
        yield from (
            (name, value.__globals__[name])
            for name in _global_names(value.__code__)
            if name in value.__globals__
        )
        names = value.__code__.co_varnames[: value.__code__.co_argcount]
        defaults = value.__defaults__ or ()
        yield from zip(names[len(names) - len(defaults) :], defaults, strict=True)
        yield from (value.__kwdefaults__ or {}).items()
    elif isinstance(value, type):
        yield from (
            (name, part)
            for name, part in vars(value).items()
            if not name.startswith("__") or callable(part)
        )
    elif not isinstance(value, types.ModuleType):
        yield from getattr(value, "__dict__", {}).items()


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from dict.fromkeys(
        step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"
    )
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)
