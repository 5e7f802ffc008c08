"""What a notebook shows of a loop, and a terminal."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

import fp8rl_jax as fp8rl
from fp8rl_jax.config.training import TrackingConfig
from fp8rl_jax.errors import UserError
from fp8rl_jax.training import live, tracking
from fp8rl_jax.training.tracking import make_tracker


@pytest.fixture
def cell(monkeypatch):
    """A notebook's cell: pages that it was given, one over the other, and what runs at its end."""
    shown, ends = [], []
    module = ModuleType("IPython.display")
    handle = SimpleNamespace(update=shown.append)
    module.HTML = str
    module.display = lambda page, display_id: shown.append(page) or handle
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    events = SimpleNamespace(register=lambda when, f: ends.append((when, f)))
    shell = SimpleNamespace(events=events)
    for of in (live, tracking):
        monkeypatch.setattr(of, "notebook", lambda: shell)
    return SimpleNamespace(shown=shown, ends=ends)


def rows(count):
    return [{"reward/mean": 0.1 * i, "mismatch/k3": 1e-3, "time/step": 2.0} for i in range(count)]


def test_a_notebook_shows_a_bar_the_last_rows_and_curves(cell, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(live.time, "monotonic", lambda: clock.now)
    shows = fp8rl.Live(12, ["reward/mean", "nothing"])
    for step, metrics in enumerate(rows(10)):
        clock.now += 60
        shows(step, metrics)
    (when, end), last = cell.ends[0], cell.shown[-1]
    assert len(cell.shown) == 10 and len(cell.ends) == 1 and when == "post_run_cell"
    assert '<progress value="10" max="12">' in last and "step 10/12" in last
    assert "0.900" in last and "0.200" in last and "0.100" not in last  # the last eight
    assert last.count("<svg") == 1 and "reward/mean" in last and "nothing" not in last
    assert "<svg" not in cell.shown[0]  # one point is no curve
    # drawing takes a tenth of the time at most, and the last row is seen all the same
    shows._takes = 1.0
    for step, metrics in enumerate(rows(3), 10):
        clock.now += 1
        shows(step, metrics)
    assert len(cell.shown) == 10
    end()
    end()
    assert len(cell.shown) == 11 and "step 12/12" in cell.shown[-1]


def test_a_run_in_a_notebook_is_shown_so(cell, tmp_path):
    tracker = make_tracker(tmp_path, TrackingConfig(), total_steps=3)
    for step, metrics in enumerate(rows(3)):
        tracker.log(step, metrics)
    tracker.close()
    assert "step 3/3" in cell.shown[-1] and "mismatch/k3" in cell.shown[-1]


def test_elsewhere_it_is_a_row_a_step(capsys):
    shows = fp8rl.Live()
    for step, metrics in enumerate(rows(2)):
        shows(step, metrics)
    shows.close()
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["step", "reward"] and "left" not in head
    assert [line.split()[:2] for line in lines] == [["0", "0.000"], ["1", "0.100"]]
    with pytest.raises(UserError, match="names: expected a list of metrics, got 'loss'"):
        fp8rl.Live(3, "loss")
