"""Functions and classes of the user's, named in a configuration by a spec.

    module:function             imported
    path/to/file.py:function    likewise, from a file
    <python>:NAME               given in Python, such as one of a notebook; no other process has it

The spec is the whole of what a configuration holds: it can be compared, hashed and written down.
What is given in Python is either registered, for as long as this process lives (`register`), or
kept with the run that it is for, by its spec (fp8rl_jax/tasks/python_objects.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from fp8rl_jax.errors import UserError

PYTHON_OBJECT = "<python>"
"""Stands where the module would in the spec of what was given in Python."""
_FILE_PREFIX = "user_file_"
"""Keeps a file called json.py from standing in for the standard library's module."""


@dataclass(frozen=True)
class _Loaded:
    function: Callable[..., Any]
    file: Path | None
    """The file that it is from; None: it has none, or needs none."""
    text: bytes | None
    """What stood in the file."""


_loaded: dict[str, _Loaded] = {}
"""By spec: what `load_once` has loaded and `register` was given."""
_imported: set[Path] = set()
"""What `import_once` has imported."""


def is_function_spec(spec: str) -> bool:
    """Say whether `spec` reads `module:function` or `path/to/file.py:function`."""
    module, separator, function = spec.rpartition(":")
    return bool(module and separator) and function.isidentifier()


def python_spec(name: str) -> str:
    """Return the spec of something that was given in Python."""
    return f"{PYTHON_OBJECT}:{name}"


def is_python_spec(spec: Any) -> bool:
    """Say whether `spec` reads `<python>:NAME`."""
    return isinstance(spec, str) and spec.startswith(f"{PYTHON_OBJECT}:")


def load_function(
    spec: str, key: str, objects: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Import the function that `spec` names; the working directory is searched as well.

    Args:
        spec: `module:function` or `path/to/file.py:function`, or what `register` returned.
        key: configuration key that the spec stands under, for the message.
        objects: what was given in Python for this run, by spec.

    Raises:
        UserError: the spec is malformed, the module does not import, or it has no such function; or
            it was given in Python to another process.
    """
    if objects and spec in objects:
        return objects[spec]
    if is_python_spec(spec):
        if spec not in _loaded:
            raise UserError(
                f"{key} = {spec!r} was given in Python, in a process that is gone; put it into a "
                "file and name it module:function or path/to/file.py:function"
            )
        return _loaded[spec].function
    module_name, _, function_name = spec.rpartition(":")
    if not module_name or not function_name:
        raise UserError(f"{key} = {spec!r} must be module:function or path/to/file.py:function")
    try:
        module = (
            _import_file(Path(module_name))
            if module_name.endswith(".py")
            else _import_module(module_name)
        )
    # The user's module may raise anything, or call sys.exit, while it is imported.
    except (Exception, SystemExit) as fault:
        raise UserError(f"{key} = {spec!r} does not import: {describe_fault(fault)}") from fault
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(
            f"{key} = {spec!r}: {module.__file__ or module_name} has no function {function_name!r}"
        )
    return function


def import_once(file: str, key: str) -> None:
    """Import a Python file for what it registers, once in a process.

    Raises:
        UserError: there is no such file, or it does not import.
    """
    path = Path(file).expanduser().resolve()
    if path in _imported:
        return
    try:
        _import_file(path)
    except (Exception, SystemExit) as fault:
        raise UserError(f"{key}: {file!r} does not import: {describe_fault(fault)}") from fault
    _imported.add(path)


def load_once(spec: str, key: str) -> Callable[..., Any]:
    """Import as `load_function` does the first time, and give the same function ever after.

    For functions that are compiled into a program: a file that is edited during a run must not give
    its next program another function than its last. Arguments and errors as in `load_function`.
    """
    if spec not in _loaded:
        _keep(spec, load_function(spec, key))
    return _loaded[spec].function


def check_unchanged(spec: str, key: str) -> None:
    """Refuse a function whose file was edited after `load_once` read it.

    Arguments and other errors as in `load_once`.

    Raises:
        UserError: the file has changed, so that the function at hand is an old one.
    """
    load_once(spec, key)
    kept = _loaded[spec]
    if kept.file is not None and _read(kept.file) != kept.text:
        raise UserError(
            f"{key} = {spec!r}: {kept.file.name} was edited after this process loaded it, and "
            "compiled programs hold the old "
            "function; start Python anew, or reload the module and give the function itself"
        )


def register(function: Callable[..., Any]) -> str:
    """Return the spec of a Python function, by which a configuration of this process can name it.

    It is `module:function` where importing that gives this very function. Any other, such as a
    lambda or a function of a notebook cell, is `<python>:NAME#n`. Each function object has a number
    of its own, so a cell that is run again makes another spec, and a program that was compiled with
    the old function is not taken for the new.
    """
    for spec, kept in _loaded.items():
        if kept.function is function:
            return spec
    module = getattr(function, "__module__", None) or "__main__"
    name = getattr(function, "__qualname__", type(function).__qualname__)
    spec = f"{module}:{name}"
    importable = (
        is_function_spec(spec) and module != "__main__" and not module.startswith(_FILE_PREFIX)
    )
    if (
        not importable
        or getattr(sys.modules.get(module), name, None) is not function
        or spec in _loaded
    ):
        spec = f"{python_spec(name)}#{sum(map(is_python_spec, _loaded)) + 1}"
    _keep(spec, function)
    return spec


def callable_with(
    key: str, name: str, given: Sequence[str], arguments: Mapping[str, float]
) -> Callable[..., Any]:
    """Load a function of the user's that takes these arguments.

    Args:
        key: configuration key of the function, for messages.
        name: its spec.
        given: names of its positional arguments, for messages.
        arguments: its keyword arguments.

    Raises:
        UserError: it does not import, or does not take these arguments.
    """
    function = load_once(name, key)
    try:
        inspect.signature(function).bind(*given, **arguments)
    except TypeError as fault:
        wanted = ", ".join([*given, *(f"{argument}=..." for argument in arguments)])
        raise UserError(f"{key} = {name!r} cannot be called with ({wanted}): {fault}") from fault
    # a function without a signature, of an extension module: the call itself will say
    except ValueError:
        pass
    return function


def call(
    key: str,
    name: str,
    built_in: Mapping[str, Callable[..., Any]],
    given: Mapping[str, Any],
    arguments: Mapping[str, float],
) -> Any:
    """Call the function that the configuration names.

    Args:
        key: configuration key of the function, for messages.
        name: of a built-in function, or the spec of another.
        built_in: functions by name.
        given: what it is called with, by the names that messages have for it.
        arguments: keyword arguments of a function that is not built in.

    Raises:
        UserError: the function does not import, does not take these arguments, or raises an
            exception.
    """
    if name in built_in:
        return built_in[name](*given.values())
    function = callable_with(key, name, tuple(given), arguments)
    try:
        return function(*given.values(), **arguments)
    except UserError:
        raise
    except Exception as fault:
        code = getattr(inspect.unwrap(function), "__code__", None)
        raise UserError(
            f"{key} = {name!r}: {describe_fault(fault, code.co_filename if code else '')}"
        ) from fault


def describe_fault(fault: BaseException, file: str = "") -> str:
    """Write `fault` on one line of at most 300 characters: its type, its text, where it was raised.

    Args:
        fault: the exception.
        file: where it was raised inside of this file goes before where it was raised at all.
    """
    text = " ".join("".join(traceback.format_exception_only(fault)).split())
    frames = [
        frame
        for frame in traceback.extract_tb(fault.__traceback__)
        if not frame.filename.startswith("<frozen")
    ]
    frames = [frame for frame in frames if frame.filename == file] or frames
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return (text if len(text) <= 250 else text[:247] + "...") + where[:50]


class Arguments(dict[str, float]):
    """{name: number}, never to be changed: a configuration that holds it is hashed, and compiled
    programs depend on it."""

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __reduce__(self):
        return Arguments, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "the arguments of a configuration cannot be changed; make another one with "
            "dataclasses.replace"
        )

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


def settle(config: Any, name: str, arguments: str) -> None:
    """Replace a function by its spec and its arguments by `Arguments`, in `__post_init__`.

    Args:
        config: the dataclass.
        name: field of the function.
        arguments: field of its arguments.
    """
    function, given = getattr(config, name), getattr(config, arguments)
    if callable(function):
        object.__setattr__(config, name, register(function))
    if isinstance(given, dict):
        numbers = {
            key: float(value) if type(value) is int else value for key, value in given.items()
        }
        object.__setattr__(config, arguments, Arguments(numbers))


def is_users(function: Any) -> bool:
    """Say whether a setting names a function of the user's, and none that is built in."""
    return isinstance(function, str) and (is_function_spec(function) or is_python_spec(function))


def function_faults(
    key: str, value: Any, built_in: Collection[str], arguments_key: str, arguments: Any
) -> Iterator[str]:
    """Yield a line for each fault of a function's name and of its arguments.

    Args:
        key: of the function.
        value: name or spec, after `settle`; None is not set.
        built_in: names.
        arguments_key: of the arguments.
        arguments: after `settle`.
    """
    if not (value is None or is_users(value) or value in tuple(built_in)):
        names = f"is none of {', '.join(map(repr, built_in))}, and no" if built_in else "is no"
        yield f"{key}: {value!r} {names} module:function or path/to/file.py:function"
    if not isinstance(arguments, dict):
        yield f"{arguments_key}: {arguments!r} must be a table of numbers"
        return
    for name, number in arguments.items():
        if not (
            isinstance(name, str)
            and name.isidentifier()
            and isinstance(number, float)
            and math.isfinite(number)
        ):
            yield f"{arguments_key}: {name} = {number!r} must be a name and a finite number"
    if arguments and not is_users(value):
        yield (
            f"{arguments_key}: {value or 'what is built in'} takes no arguments; they are for "
            f"a function of your own, in {key}"
        )


def _keep(spec: str, function: Callable[..., Any]) -> None:
    module = None if is_python_spec(spec) else sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None)
    _loaded[spec] = _Loaded(
        function, Path(file) if file else None, _read(Path(file)) if file else None
    )


def _read(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _import_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    # A file may import its neighbours, as it could when run as a script.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = f"{_FILE_PREFIX}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # its suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
