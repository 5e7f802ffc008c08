"""A checkpoint directory with files that no run wrote: what is whole is found, and nothing of it is
lost."""

import numpy as np
import pytest

from fp8rl_jax.config.training import CheckpointConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.training import checkpoint
from fp8rl_jax.training.checkpoint import Checkpoints

RUBBISH = ["notes.txt", "-1", "1.5", "007x", "3.orbax-checkpoint-tmp-12", "é", ".hidden", "default"]


def tree(value: float) -> dict[str, np.ndarray]:
    return {"weight": np.full((4,), value, np.float32)}


@pytest.mark.parametrize("kind", ["file", "directory", "full"])
def test_rubbish_beside_checkpoints(tmp_path, kind):
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    checkpoints.save(1, tree(1.0))
    checkpoints.save(2, tree(2.0))
    checkpoints.close()
    for name in RUBBISH:
        place = tmp_path / "checkpoints" / name
        if kind == "file":
            place.write_bytes(b"\x00rubbish")
        else:
            place.mkdir()
            if kind == "full":
                (place / "metadata").write_bytes(b"\xff")
    again = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    assert again.steps() == [1, 2]
    step, found = again.restore(tree(0.0))
    assert step == 2 and np.array_equal(found["weight"], tree(2.0)["weight"])
    again.save(3, tree(3.0))
    assert again.steps() == [2, 3] and again.restore(tree(0.0))[0] == 3
    again.close()
    assert all((tmp_path / "checkpoints" / name).exists() for name in RUBBISH if "tmp" not in name)


@pytest.mark.parametrize("place", ["file", "directory"])
def test_a_newest_step_that_is_rubbish_is_passed_over(tmp_path, place):
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    checkpoints.save(1, tree(1.0))
    checkpoints.close()
    newest = tmp_path / "checkpoints" / "5"
    newest.write_bytes(b"rubbish") if place == "file" else newest.mkdir()
    again = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    assert again.restore(tree(0.0))[0] == 1
    again.save(5, tree(5.0))
    assert again.restore(tree(0.0))[0] == 5
    again.close()


def test_nothing_but_rubbish_is_no_checkpoint(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "x").write_text("x")
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        Checkpoints(tmp_path / "checkpoints", CheckpointConfig()).restore(tree(0.0))


def test_processes_that_see_other_checkpoints_do_not_go_on(tmp_path, monkeypatch):
    """As where hosts share no output, or the file system's caches are behind."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    checkpoints.save(1, tree(1.0))
    monkeypatch.setattr(checkpoint, "gather_text", lambda text: [text, text, "[]"])
    with pytest.raises(UserError, match=r"process 0 sees .* \[1\], and process 2 those of \[\]: "):
        checkpoints.restore(tree(0.0))
    monkeypatch.setattr(checkpoint, "gather_text", lambda text: [text] * 3)
    assert checkpoints.restore(tree(0.0))[0] == 1
