"""Single settings by name, for those who write them in Python instead of a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from fp8rl_jax.config.recipe import RECIPES, Recipe
from fp8rl_jax.config.run import RunConfig
from fp8rl_jax.config.schema import (
    Mismatch,
    convert,
    describe,
    fields_of,
    leaves,
    show,
    unknown_key_hint,
)
from fp8rl_jax.errors import UserError

_MAIN = ("rollout", "optimizer", "trainer")
_FURTHER = ("sft", "evaluation")
"""What has settings of the same names as those above, which then need their dotted key."""


def with_settings(
    config: RunConfig,
    settings: Mapping[str, Any],
    recipe: str | Recipe | None = None,
    of_runs: Collection[str] = (),
) -> RunConfig:
    """Change single settings of `config`.

    Args:
        config: a run's.
        settings: {name: value}. A name is a field of RunConfig (recipe, seed, rl=RLConfig(...)),
            the last name of a setting that no other table has (samples_per_prompt; that of sft and
            evaluation is not meant where rollout, optimizer or trainer has the name: learning_rate,
            steps), or a dotted key ("rl.correction.method"). A table goes before the single
            settings in it; for the model's, its path will do.
        recipe: a name, or a Recipe, which becomes a row of `recipes`; None: as it is, or as
            `settings` has it.
        of_runs: keys that do nothing here.

    Raises:
        UserError: one line for each name that is unknown or stands for several settings, and for
            each value that does not fit; or `config` is none.
    """
    if not isinstance(config, RunConfig):
        raise UserError(
            f"config: expected a RunConfig, got {show(config)}; single settings are keywords of "
            "their own, such as learning_rate=1e-5"
        )
    changes, faults = {}, []
    recipe = settings.get("recipe") if recipe is None else recipe
    own = fields_of(RunConfig)
    annotations = dict(leaves(RunConfig))
    for name, value in settings.items():
        if name == "model" and isinstance(value, str | Path):
            changes["model.path"] = str(value)
            continue
        if name in own and name not in of_runs:
            changes[name] = value
            continue
        dotted = name in annotations and "." in name
        keys = [name] if dotted else _meant(name, annotations, of_runs)
        if len(keys) == 1:
            changes[keys[0]] = value
        elif keys:
            faults.append(f"{name}: may be {' or '.join(keys)}; give the dotted key")
        elif of_run := _meant(name, annotations):
            faults.append(f"{name}: is {of_run[0]}, which a whole run has (fp8rl.train)")
        else:
            faults.append(f"{name}: unknown setting{unknown_key_hint(name, [*annotations, *own])}")
    if isinstance(recipe, Recipe):
        changes["recipe"] = recipe.name
        if RECIPES.get(recipe.name) != recipe:
            changes["recipes"] = (
                config.recipes | changes.get("recipes", {}) | {recipe.name: recipe.table()}
            )
    elif recipe is not None:
        changes["recipe"] = recipe
    # tables first, single settings over them
    for key, value in sorted(changes.items(), key=lambda item: item[0].count(".")):
        try:
            config = _changed(config, key.split("."), value, annotations.get(key))
        except Mismatch:
            faults.append(f"{key}: expected {describe(annotations[key])}, got {show(value)}")
        except UserError as error:
            faults += str(error).splitlines()
    if faults:
        raise UserError("\n".join(faults))
    return config


def _meant(name: str, keys: Iterable[str], of_runs: Collection[str] = ()) -> list[str]:
    """The dotted keys that a last name may stand for."""
    found = [key for key in keys if key.rpartition(".")[2] == name and key not in of_runs]
    # the trainer's mesh is the mesh
    found = [key for key in found if not key.startswith("mesh.rollout.")]
    main = [key for key in found if key.split(".")[0] in _MAIN]
    others = [key for key in found if key.split(".")[0] not in (*_MAIN, *_FURTHER)]
    return found if others or not main else main


def _changed(node: Any, path: list[str], value: Any, annotation: Any) -> Any:
    name, *rest = path
    if rest:
        value = _changed(getattr(node, name), rest, value, annotation)
    elif annotation is str and callable(value):
        pass  # its class makes a function's spec of it
    elif annotation is not None:
        value = convert(value, annotation)
    elif type(value) is not type(getattr(node, name)):
        raise UserError(
            f"{name}: expected a {type(getattr(node, name)).__name__}, got {show(value)}"
        )
    return dataclasses.replace(node, **{name: value})
