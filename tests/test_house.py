"""The floors of the house: a file imports from its own floor and from those below it
(docs/architecture.md)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from experiments import names

ROOT = Path(__file__).parents[1]
HOUSE = ("experiments", "fp8rl_jax", "pallas_kernels")
FLOORS = (
    "experiments",
    "fp8rl_jax/cli",
    "fp8rl_jax/__init__",
    "fp8rl_jax/ablation",
    "fp8rl_jax/report",
    "fp8rl_jax/compare",
    "fp8rl_jax/training",
    "fp8rl_jax/rollout",
    "fp8rl_jax/tasks",
    "fp8rl_jax/weights",
    "fp8rl_jax/tokenizers",
    "fp8rl_jax/models",
    "fp8rl_jax/rl",
    "fp8rl_jax/statistics",
    "fp8rl_jax/precision",
    "fp8rl_jax/self_test",
    "fp8rl_jax/parallel",
    "fp8rl_jax/packages",
    "fp8rl_jax/caching",
    "fp8rl_jax/compiling",
    "fp8rl_jax/config",
    "fp8rl_jax/functions",
    "fp8rl_jax/json_fields",
    "fp8rl_jax/errors",
    "fp8rl_jax/durable",
    "pallas_kernels",
)
"""From the top down."""
FROM_OUTSIDE = {
    "fp8rl_jax/__init__": set(),
    "fp8rl_jax/rl": {"jax", "jaxtyping", "numpy"},
    "fp8rl_jax/statistics": {"numpy", "scipy"},
    "fp8rl_jax/config": {"tomli_w"},
    "fp8rl_jax/functions": set(),
    "fp8rl_jax/json_fields": set(),
    "fp8rl_jax/errors": set(),
    "fp8rl_jax/durable": set(),
    "pallas_kernels": {"jax", "jaxtyping", "numpy"},
}
"""What a floor may import besides this house and the standard library, where that is promised."""


def floor(path: str) -> str:
    """The floor of "fp8rl_jax/rl/loss.py", or of the module "fp8rl_jax/rl/loss/policy_loss"."""
    first, *rest = path.removesuffix(".py").split("/")
    if first != "fp8rl_jax":
        return first
    known = f"{first}/{rest[0]}" if rest else ""
    # a name of the face: `from fp8rl_jax import Session`
    return known if known in FLOORS else f"{first}/__init__"


def imports(source: str) -> Iterator[str]:
    """What a source text imports anywhere in it, as paths: "jax/numpy", "fp8rl_jax/rl"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name.replace(".", "/") for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import: name the module in full"
            yield from (f"{node.module}.{name.name}".replace(".", "/") for name in node.names)


def faults(path: str, source: str) -> list[str]:
    """What a file imports from above its floor, or from outside where that is promised not to
    be."""
    own, found = floor(path), []
    for imported in imports(source):
        package = imported.split("/")[0]
        if package in HOUSE:
            if FLOORS.index(floor(imported)) < FLOORS.index(own):
                found.append(f"{path} imports {imported}, from a higher floor")
        elif package not in sys.stdlib_module_names and package not in FROM_OUTSIDE.get(
            own, {package}
        ):
            found.append(f"{path} imports {package}")
    return found


FILES = sorted(path.relative_to(ROOT) for top in HOUSE for path in (ROOT / top).rglob("*.py"))


def test_every_file_stands_on_a_floor():
    assert {floor(path.as_posix()) for path in FILES} == set(FLOORS)
    top = {
        path.with_suffix("").as_posix()
        for path in FILES
        if len(path.parts) == 2 and path.parts[0] == "fp8rl_jax"
    }
    assert top <= set(FLOORS), "a module beside the folders: give it a floor"


def test_imports_go_downward():
    assert [
        fault for path in FILES for fault in faults(path.as_posix(), (ROOT / path).read_text())
    ] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("fp8rl_jax/rl/loss.py", "from fp8rl_jax.models import policy"),
        ("fp8rl_jax/rl/loss.py", "def f():\n    import fp8rl_jax.training.session"),
        ("fp8rl_jax/training/step.py", "from fp8rl_jax import Session"),
        ("fp8rl_jax/config/run.py", "from fp8rl_jax.caching import cache_dir"),
        ("fp8rl_jax/config/run.py", "import jax.numpy as jnp"),
        ("pallas_kernels/matmul/api.py", "from fp8rl_jax.errors import UserError"),
        ("pallas_kernels/matmul/api.py", "import optax"),
        ("fp8rl_jax/cli/train.py", "import experiments.figures"),
    ],
)
def test_an_import_upward_is_seen(path, source):
    assert len(faults(path, source)) == 1


def test_no_files_import_each_other_in_a_circle():
    modules = {path.with_suffix("").as_posix().removesuffix("/__init__"): path for path in FILES}
    graph = {}
    for module, path in modules.items():
        found = {name if name in modules else name.rpartition("/")[0] for name in needed(path)}
        graph[module] = (found & modules.keys()) - {module}
    # raises CycleError, which names the circle
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules)


def needed(path: Path) -> set[str]:
    """What a file imports, anywhere in it, besides names for annotations alone."""
    tree = ast.parse((ROOT / path).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    return set(imports(ast.unparse(ast.fix_missing_locations(tree))))


def test_the_page_of_public_names_is_what_packages_import_of_each_other():
    page = (ROOT / "docs" / "names.md").read_text()
    assert page == names.page(), "python -m experiments.names > docs/names.md"


def test_the_picture_has_the_same_floors():
    page = (ROOT / "docs" / "architecture.md").read_text()
    picture = page.split("```text\n", 1)[1].split("```", 1)[0]
    lines = [line for line in picture.splitlines() if line and not line.startswith(" ")]
    assert tuple(line.split()[0].rstrip("/").removesuffix(".py") for line in lines) == FLOORS
