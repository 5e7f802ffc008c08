"""What a result depends on: a hash of the modules that it names and of all that they import from
this repository.

An import counts for the module that defines the name, not for the package that hands it on:
`pallas_kernels` imports every kernel, and a matrix product does not depend on attention. An import
inside of a function, which is how an operation comes to its kernel, counts in the packages of the
named modules alone: a product that takes only scales from the quantizers does not depend on their
kernels. Comments and the layout of the code do not count.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("pallas_kernels", "fp8rl_jax", "experiments")


def fingerprint(modules: Iterable[str], root: Path = ROOT) -> str:
    """A hash of `closure`."""
    digest = hashlib.sha256()
    for module in sorted(closure(modules, root)):
        digest.update(f"{module}\0{ast.dump(_tree(_file(module, root)))}\0".encode())
    return digest.hexdigest()[:16]


def closure(modules: Iterable[str], root: Path = ROOT) -> set[str]:
    """The modules, and every one that they import from `PACKAGES`, directly or not."""
    reached: set[str] = set()
    queue = list(modules)
    packages = {m if _file(m, root).name == "__init__.py" else m.rpartition(".")[0] for m in queue}
    while queue:
        module = queue.pop()
        if module not in reached:
            reached.add(module)
            own = any(f"{module}.".startswith(f"{package}.") for package in packages)
            queue += _imported(module, root, own)
    return reached


@cache
def _imported(module: str, root: Path, inside: bool) -> list[str]:
    imports = _imports(_tree(_file(module, root)), inside)
    return [_owner(base, name, root) for base, name in imports if base.split(".")[0] in PACKAGES]


def _imports(tree: ast.Module, inside: bool = False) -> Iterator[tuple[str, str]]:
    """(module, name) of each `from module import name`, no name for `import module`; those `inside`
    of functions, too."""
    for node in ast.walk(tree) if inside else tree.body:
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def _owner(base: str, name: str, root: Path) -> str:
    """The module that `from base import name` gets it from."""
    if name and _file(f"{base}.{name}", root).exists():
        return f"{base}.{name}"
    file = _file(base, root)
    if name and file.name == "__init__.py":  # a package: the name may be another module's
        for module, handed_on in _imports(_tree(file)):
            if handed_on == name and module.split(".")[0] in PACKAGES:
                return _owner(module, name, root)
    return base


def _file(module: str, root: Path) -> Path:
    path = root / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())
