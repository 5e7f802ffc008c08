"""The public names of each package: what files of other packages import from it.

    python -m experiments.names > docs/names.md

A test holds the page to the code.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOUSE = ("fp8rl_jax", "pallas_kernels")
_HEAD = """# Public names

What files of other packages import, by package and file: written by
`python -m experiments.names > docs/names.md`. Any other name may change without a word. What a
notebook needs is in `fp8rl_jax` itself; `rl` and `pallas_kernels` can be used alone.
"""


def package(module: str) -> str:
    """The package of a module: fp8rl_jax.rl of fp8rl_jax.rl.loss, pallas_kernels of all its own."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "fp8rl_jax" and len(parts) > 1 else parts[0]


def modules() -> dict[str, ast.Module]:
    """The house's files, by module name."""
    found = {}
    for top in (*HOUSE, "experiments"):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
            found[name.removesuffix(".__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def public_names(trees: dict[str, ast.Module]) -> dict[str, dict[str, set[str]]]:
    """{package: {module that has them: names}}; a package's own list counts as imported."""
    names: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for user, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node.module not in trees:
                continue
            if package(user) == package(node.module) or not node.module.startswith(HOUSE):
                continue
            for alias in node.names:
                if f"{node.module}.{alias.name}" not in trees:
                    names[package(node.module)][node.module].add(alias.name)
    for module, tree in trees.items():
        if module == package(module) and (listed := exported(tree)):
            names[module][module] |= listed
    return names


def exported(tree: ast.Module) -> set[str]:
    """What `__all__` lists, or the face's table of names."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("_HOMES", "__all__"):
            return set(ast.literal_eval(node.value))
    return set()


def page() -> str:
    """The page: a section a package, a line a module."""
    trees = modules()
    lines = [_HEAD]
    for name, by_module in sorted(public_names(trees).items()):
        count = sum(map(len, by_module.values()))
        lines.append(f"## `{name}` ({count})\n")
        for module, names in sorted(by_module.items()):
            where = module.removeprefix(name).removeprefix(".") or "itself"
            lines.append(f"- {where}: {', '.join(f'`{each}`' for each in sorted(names))}")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
