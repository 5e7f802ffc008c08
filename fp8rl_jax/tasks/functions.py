"""Functions of the user's, named in a configuration as `module:function` or `path/to/file.py:function`; or given in Python, and
named as `<python>:NAME`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8rl_jax.config.rewards import is_python_object
from fp8rl_jax.errors import UserError


def load_function(spec: str, key: str, objects: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Import the function that `spec` names; the working directory is searched as well.

    Args:
        spec: `module:function` or `path/to/file.py:function`; or `<python>:NAME`, which `objects` has.
        key: configuration key that the spec stands under, for the message.
        objects: what was given in Python, by spec.

    Raises:
        UserError: the spec is malformed, the module does not import, or it has no such function.
    """
    if is_python_object(spec) and spec in (objects or {}):
        return objects[spec]
    module_name, _, function_name = spec.rpartition(":")
    if not module_name or not function_name:
        raise UserError(f"{key} = {spec!r} must be module:function or path/to/file.py:function")
    try:
        module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    # The user's module may raise anything, or call sys.exit, while it is imported.
    except (Exception, SystemExit) as fault:
        raise UserError(f"{key} = {spec!r} does not import: {describe_fault(fault)}") from fault
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"{key} = {spec!r}: {module.__file__ or module_name} has no function {function_name!r}")
    return function


def describe_fault(fault: BaseException) -> str:
    """`fault` on one line of at most 300 characters: its type, its text, and where it was raised."""
    text = " ".join("".join(traceback.format_exception_only(fault)).split())
    frames = [frame for frame in traceback.extract_tb(fault.__traceback__) if not frame.filename.startswith("<frozen")]
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return (text if len(text) <= 250 else text[:247] + "...") + where[:50]


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
    # A prefix keeps a file called json.py from standing in for the standard library's.
    name = f"task_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
