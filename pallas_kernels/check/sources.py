"""What a result depends on: a hash of the modules that it names and of all that they import from
this repository.

An import counts for the module that defines the name, not for the package that hands it on:
`pallas_kernels` imports every kernel, and a matrix product does not depend on attention. An import
inside of a function, which is how an operation comes to its kernel, counts in the packages of the
named modules alone, or where it is said: a product that takes only scales from the quantizers does
not depend on their kernels. Comments and the layout of the code do not count in `fingerprint`.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pallas_kernels", "fp8rl_jax", "experiments")


def fingerprint(modules: Iterable[str], root: Path = ROOT) -> str:
    """A hash of `closure`."""
    digest = hashlib.sha256()
    for module in sorted(closure(modules, root)):
        digest.update(f"{module}\0{ast.dump(_tree(file_of(module, root)))}\0".encode())
    return digest.hexdigest()[:16]


def closure(modules: Iterable[str], root: Path = ROOT, inside: Iterable[str] = ()) -> set[str]:
    """The modules, and every one that they import from `PACKAGES`, directly or not.

    Args:
        inside: packages in which imports inside of functions count, beside the modules' own.
    """
    reached: set[str] = set()
    queue = list(modules)
    packages = {
        m if file_of(m, root).name == "__init__.py" else m.rpartition(".")[0] for m in queue
    }
    packages |= {*inside}
    while queue:
        module = queue.pop()
        if module not in reached:
            reached.add(module)
            own = any(f"{module}.".startswith(f"{package}.") for package in packages)
            queue += _imported(module, root, own)
    return reached


@cache
def _imported(module: str, root: Path, inside: bool) -> list[str]:
    imports = _imports(_tree(file_of(module, root)), inside)
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
    if name and file_of(f"{base}.{name}", root).exists():
        return f"{base}.{name}"
    file = file_of(base, root)
    if name and file.name == "__init__.py":  # a package: the name may be another module's
        for module, handed_on in _imports(_tree(file)):
            if handed_on == name and module.split(".")[0] in PACKAGES:
                return _owner(module, name, root)
    return base


def file_of(module: str, root: Path = ROOT) -> Path:
    """The file of a module, or where it would be."""
    path = root / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_name(f"{path.name}.py")


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())
