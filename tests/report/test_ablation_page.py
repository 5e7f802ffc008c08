"""The page and the text of an ablation, from a synthetic record."""

import html
import json
import math
import re
import shutil

import numpy as np
import pytest
from report.synthetic import METHODS, WHY, write_ablation, write_run
from report.test_browser import browse
from report.test_page import Elements
from scipy import stats

from fp8rl_jax.errors import UserError
from fp8rl_jax.report.ablation import text, write_page
from fp8rl_jax.report.charts import CURVES, THROUGHPUT, curve_chart
from fp8rl_jax.report.page import config_differences, headline, render
from fp8rl_jax.report.runs import group_runs, read_runs

SENTENCE = "fp8-rl - bf16: -0.010 (-0.034, 0.013), 5 seeds: no worse within 0.04"


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return write_ablation(tmp_path_factory.mktemp("ablation"))


@pytest.fixture(scope="module")
def page(record):
    path = write_page(record)
    assert path == record.with_name("ablation.html")
    return path.read_text()


def changed(record, tmp_path, change):
    """A copy of a record, beside copies of none of its runs, with a change."""
    content = json.loads(record.read_text())
    change(content)
    path = tmp_path / "ablation.json"
    path.write_text(json.dumps(content))
    return path


def test_verdicts_numbers_and_methods_are_in_the_page_and_in_the_text(record, page, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    shown = Elements(page).text
    printed = text(record)
    assert '<details id="methods">' in page
    for said in (SENTENCE, METHODS, "Does FP8 cost accuracy here", "jet-rl", "float32", "7.25"):
        assert said in shown and said in printed
    # accuracy 0.9 + lift, lift 0.01 (seed - 2) + 0.003 sin(7 seed + arm): t intervals of scipy
    for arm in ("0.902 (0.882, 0.922)", "0.891 (0.874, 0.908)"):
        assert arm in shown and arm in printed
    # the difference that the study sees, and how far pairs go together
    assert re.search(r"Sees, in 80 % +\S+ +0.030 +0.030\n", printed) and "Sees, in 80 %" in shown
    assert re.search(r"Correlation of pairs +\S+ +0.9 +0.9\n", printed)
    assert page.index(SENTENCE) < page.index('id="chart-differences"') < page.index("<table")
    answer = page.partition('id="chart-differences"')[2].partition("</figure>")[0]
    # of each arm an interval and its middle; the baseline has none
    assert re.findall(r'class="mean" data-arm="(\d)"', answer) == ["1", "1", "2", "2"]
    assert "the loss of 0.04 that is allowed" in answer and "less that of bf16" in answer


@pytest.mark.parametrize(("columns", "beside"), [(60, [1, 1, 1]), (80, [2, 1]), (120, [3])])
def test_the_text_is_as_wide_as_the_terminal_and_breaks_no_number(
    record, tmp_path, monkeypatch, columns, beside
):
    def change(content):
        content["comparisons"][0]["sentence"] = f"{SENTENCE}; {SENTENCE}"

    monkeypatch.setenv("COLUMNS", str(columns))
    printed = text(changed(record, tmp_path, change))
    assert max(map(len, printed.splitlines())) <= columns
    tables = re.findall(r"^ {10,}\S.*$", printed, re.M)
    assert [len(heads.split()) for heads in tables] == beside
    for number in (
        "0.902 (0.882, 0.922)",
        "3 of 5, 1 failed, 1 collapsed",
        "unquantized (float32)",
    ):
        assert number in printed
    # no line begins within an estimate and its interval
    assert printed.count("-0.010 (-0.034, 0.013)") == 3 and "fp8-rl - bf16: -0.010" in printed


def test_the_recipe_that_quantizes_nothing_is_called_so_where_it_is_float32(record, tmp_path, page):
    said = "unquantized (float32)"
    assert f"bf16, {said}</button>" in page and Elements(page).text.count(said) == 2
    row, *_ = re.findall(r"^Recipe .*$", text(record), re.M)
    assert row.split()[:4] == ["Recipe", "unquantized", "(float32)", "fp8-rl"]

    def change(content):
        for arm in content["arms"]:
            arm["compute_dtype"] = "bfloat16"

    assert said not in text(changed(record, tmp_path, change))


def test_runs_that_were_not_made_alike_are_named(record, tmp_path):
    def change(content):
        content["arms"][1]["runs"][2] |= {"devices": ["gpu:H200"], "commit": "decade"}

    printed = text(changed(record, tmp_path, change))
    assert "note: runs were made with different devices: cpu:cpu; gpu:H200" in printed
    assert "note: runs were made with different commits: c0ffee; decade" in printed
    assert "were made with different" not in text(record)


def test_of_judged_models_the_served_accuracy_is_shown_too(record, tmp_path):
    printed = text(changed(record, tmp_path, lambda content: content.update(judge="bf16")))
    assert "eval/accuracy, as served" in printed and "eval/accuracy, as served" not in text(record)


def test_runs_that_failed_or_collapsed_are_listed_with_the_reason(record, page):
    shown = re.sub(r"\s+", " ", Elements(page).text)
    printed = text(record)
    assert "3 of 5, 1 failed, 1 collapsed" in shown
    assert f"jet-rl, seed 1: failed: {WHY}" in printed
    assert "jet-rl, seed 3: collapsed: reward under 0.1" in printed
    assert WHY in shown and "reward under 0.1" in shown
    # the collapsed run's curve is drawn, and its outcome counts: mean of 0.1 and three others
    assert 'class="seed" data-arm="2" data-seed="2"' in page
    assert "0.685" in shown and "0.685" in printed


def test_text_of_models_and_users_is_escaped_and_nothing_is_fetched(page):
    elements = Elements(page)
    assert not {"b", "i", "link", "iframe", "img"} & set(elements.tags)
    assert elements.tags.count("script") == 2 and "demo <b>" in elements.text
    assert "#0a0" not in page and "@import" not in page
    assert "http:" not in page and "https:" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', page)) <= set(ids)
    assert set(re.findall(r"var\((--[a-z]+\d*)\)", page)) <= set(
        re.findall(r"(--[a-z]+\d*):", page)
    )


def test_the_same_record_gives_the_same_page(record, page):
    assert write_page(record).read_text() == page


def test_colour_is_the_recipe_and_dashes_tell_its_arms_apart(record, tmp_path):
    def change(content):
        content["arms"][2]["recipe"] = "fp8-rl"

    path = changed(record, tmp_path, change)
    for run in record.parent.iterdir():
        if run.is_dir():
            (tmp_path / run.name).symlink_to(run)
    page = write_page(path).read_text()
    keys = re.findall(r'<button[^>]*data-arm="(\d)".*?stroke: var\(--arm(\d)\)"([^>]*)>', page)
    assert [(arm, colour) for arm, colour, _ in keys] == [("0", "0"), ("1", "1"), ("2", "1")]
    assert [bool(dashes) for *_, dashes in keys] == [False, False, True]


def test_a_record_without_its_runs_has_its_verdicts_and_the_curves_that_it_keeps(record, tmp_path):
    path = changed(record, tmp_path, lambda content: None)
    page = write_page(path).read_text()
    assert SENTENCE in page and 'id="chart-eval-accuracy"' in page
    assert 'id="chart-entropy"' not in page
    said = "curves of 15 runs are from this record: their directories have no metrics.jsonl"
    assert said in page and f"note: {said}" in " ".join(text(path).split())

    def without(content):
        for arm in content["arms"]:
            for made in arm["runs"]:
                made["series"] = {}

    path = changed(record, tmp_path, without)
    assert SENTENCE in write_page(path).read_text()
    assert "note: no curves of bf16-0: it has no metrics.jsonl" in text(path)

    def damaged(content):
        content["arms"][0]["runs"][0]["series"] = {"entropy": {"steps": [1], "values": []}}

    with pytest.raises(UserError, match="series of bf16-0: entropy has not as many steps"):
        write_page(changed(record, tmp_path, damaged))


def test_one_seed_has_a_value_and_no_interval(tmp_path):
    path = write_ablation(tmp_path, arms=("bf16", "fp8-rl"), seeds=1)
    write_page(path)
    assert re.search(r"eval/accuracy +0\.900 +0\.893", text(path))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content.update(version=1), "not written by this version's `fp8rl ablate`"),
        (lambda content: content.update(baseline="none"), "baseline 'none' is no arm"),
        (lambda content: content["metric"].update(margin=0), "metric.margin is not positive"),
        (lambda content: content["arms"][1]["runs"][0].pop("why"), "arms[1].runs[0].why"),
        (lambda content: content["comparisons"][0].pop("sentence"), "comparisons[0].sentence"),
    ],
)
def test_damaged_records_are_refused_in_one_line(record, tmp_path, change, said):
    path = changed(record, tmp_path, change)
    with pytest.raises(UserError) as fault:
        write_page(path)
    assert str(fault.value).startswith(f"{path}: ") and said in str(fault.value)
    assert "\n" not in str(fault.value)


def test_sixty_runs_fit_into_two_megabytes(tmp_path):
    arms = [f"arm{index}" for index in range(6)]
    page = write_page(write_ablation(tmp_path, arms, seeds=10, steps=300))
    assert page.stat().st_size < 2_000_000
    assert page.read_text().count('class="seed"') >= 58 * len(CURVES)


def test_report_groups_runs_that_differ_in_their_seed_alone(tmp_path):
    written = [
        write_run(tmp_path / f"{recipe}-{seed}", recipe, seed=seed, lift=0.01 * seed)
        for recipe in ("bf16", "fp8-rl")
        for seed in (10, 9, 8)
    ]
    alone = write_run(tmp_path / "other", "bf16", seed=9, steps=50)
    arms = group_runs(read_runs([*written, alone]), colours=6)
    assert [arm.label for arm in arms] == [
        "bf16 recipe, float32 compute, 3 seeds",
        "fp8-rl recipe, float32 compute, 3 seeds",
        "other (bf16 recipe, float32 compute)",
    ]
    assert [run.config["seed"] for run in arms[0].runs] == [8, 9, 10]
    # 0.09 with a standard deviation of 0.01: t(0.975, 2) 0.01 / sqrt(3) = 0.0248
    row = headline(arms[0])
    assert row["Held-out accuracy, first → last"] == "0.390 (0.365, 0.415) → 0.990 (0.965, 1.015)"
    assert row["Reward, first → last tenth"] == "0.32 (0.295, 0.345) → 0.96 (0.935, 0.985)"
    assert ("seed", ["8, 9, 10", "8, 9, 10", "9"]) in config_differences(arms)
    page = render(arms)
    assert page.count("Thin: single seeds.") == 1 and page.count("<button") == 3 + 2
    svg = curve_chart(CURVES[0], arms).svg
    assert len(re.findall(r'class="seed" data-arm="[01]"', svg)) == 6
    assert len(re.findall(r'class="mean" data-arm="[012]"', svg)) == 3


def test_runs_of_one_seed_or_without_one_are_not_grouped(tmp_path):
    same = [write_run(tmp_path / name, "bf16", steps=5, seed=0) for name in ("a", "b")]
    none = [write_run(tmp_path / name, "fp8-rl", steps=5) for name in ("c", "d")]
    arms = group_runs(read_runs([*same, *none]), colours=6)
    assert [arm.name for arm in arms] == ["a", "b", "c", "d"]


def test_the_band_is_the_t_interval_over_seeds_and_of_the_logarithm_on_a_logarithmic_axis(record):
    directories = [record.parent / f"bf16-{seed}" for seed in range(5)]
    (arm,) = group_runs(read_runs(directories), colours=6)
    k3, speed = (curve_chart(curve, [arm]).hover for curve in (CURVES[2], THROUGHPUT))
    assert k3 and speed
    step, mean, low, high, seeds = k3["arms"][0][-1]
    assert (step, seeds) == (59, 5) and mean**2 == pytest.approx(low * high, rel=1e-3)
    (step, *numbers, seeds) = speed["arms"][0][0]
    speeds = [1000 + 10 * (seed - 2 + 0.3 * math.sin(7 * seed)) for seed in range(5)]
    low, high = stats.t.interval(0.95, 4, np.mean(speeds), stats.sem(speeds))
    assert (step, seeds) == (1, 5), "the first step compiles"
    assert numbers == pytest.approx([np.mean(speeds), low, high], rel=1e-4)


def test_an_arm_that_has_not_logged_a_curve_yet_is_left_out_of_it(record, tmp_path):
    """As sync/* after the first step of a run, while another arm's runs have finished."""
    directories = []
    for name in ("bf16-0", "bf16-1", "fp8-rl-0", "fp8-rl-1"):
        directories.append(shutil.copytree(record.parent / name, tmp_path / name))
        if name.startswith("fp8-rl"):
            path = tmp_path / name / "metrics.jsonl"
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            lines = [json.dumps(row | {"mismatch/k3": None}) + "\n" for row in rows]
            path.write_text("".join(lines))
    for some in (directories, directories[::2]):
        chart = curve_chart(CURVES[2], group_runs(read_runs(some), colours=6))
        assert chart.hover and [*map(bool, chart.hover["arms"].values())] == [True, False]


PROBE = """<!doctype html><meta charset="utf-8">
<iframe style="border: 0; width: {width}px; height: 844px" srcdoc="{page}"></iframe>
<pre id="result"></pre>
<script>
document.querySelector("iframe").addEventListener("load", (event) => {{
  const page = event.target.contentDocument, root = page.documentElement;
  const figures = [...page.querySelectorAll("figure")];
  const figure = page.getElementById("chart-reward-mean");
  const svg = figure.querySelector("svg"), place = svg.getBoundingClientRect();
  const point = {{clientX: place.left + place.width / 2, clientY: place.top + place.height / 2}};
  svg.dispatchEvent(new event.target.contentWindow.PointerEvent("pointermove", point));
  const tip = figure.querySelector(".tip");
  const read = tip.hidden ? "" : tip.innerText;
  const mean = svg.querySelector('.mean[data-arm="1"]'), button = page.querySelectorAll("#legend button");
  const before = mean.getBoundingClientRect().width;
  button[1].click();
  const after = mean.getBoundingClientRect().width;
  button[1].click();
  [...button].at(-2).click();
  document.getElementById("result").textContent = JSON.stringify({{
    width: root.clientWidth,
    scroll: root.scrollWidth,
    charts: figures.map((figure) => figure.id),
    bottom: Math.min(...figures.map((figure) => figure.getBoundingClientRect().bottom)),
    read, before, after, back: mean.getBoundingClientRect().width,
    seeds: svg.querySelector(".seed").getBoundingClientRect().width,
    resources: page.defaultView.performance.getEntriesByType("resource").map((entry) => entry.name),
  }});
}});
</script>"""


@pytest.mark.parametrize("width", [1920, 1200, 480, 390])
def test_in_a_browser_it_fits_and_its_legend_and_pointer_work(chromium, tmp_path, page, width):
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.format(width=width, page=html.escape(page)))
    dom = browse(chromium, tmp_path, "--window-size=1400,1000", "--dump-dom", probe.as_uri())
    (result,) = re.findall(r'<pre id="result">(.*?)</pre>', dom)
    found = json.loads(html.unescape(result))
    assert found["scroll"] <= found["width"] and found["resources"] == []
    assert len(found["charts"]) == len(CURVES) + 3
    if width < 500:
        assert found["bottom"] <= 844, "the first chart is on the first screen of a phone"
    # left of the middle of the axes; rewards 0.2 + 0.7 step / 59 + lift, means of three steps
    assert found["read"].startswith(
        "step 28\nbf16, unquantized (float32): 0.522 (0.502, 0.542)\nfp8-rl: 0.511 ("
    )
    assert found["before"] > 100 and found["after"] == 0 and found["back"] == found["before"]
    assert found["seeds"] == 0, "the legend's button hides the seeds"
