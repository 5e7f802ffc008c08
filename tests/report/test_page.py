import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from report.synthetic import PROMPT, write_run

from fp8rl_jax.cli import main as cli
from fp8rl_jax.errors import UserError
from fp8rl_jax.report.charts import (
    ARM_COLOURS,
    CURVES,
    curve_chart,
    phase_seconds,
    step_seconds,
    timing_chart,
)
from fp8rl_jax.report.page import config_differences, headline, render, sample_pairs, write_report
from fp8rl_jax.report.runs import group_runs, read_runs


def read_arms(directories):
    return group_runs(read_runs(directories), ARM_COLOURS)


@pytest.fixture(scope="module")
def arms(tmp_path_factory):
    parent = tmp_path_factory.mktemp("runs")
    return read_arms(
        [write_run(parent / "bf16", "bf16", k3=0.0), write_run(parent / "fp8-rl", "fp8-rl")]
    )


class Elements(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def test_headline_has_the_numbers_of_the_run(arms):
    row = headline(arms[1])
    # Rewards 0.2 + 0.7 i / 59: the first six have mean 0.2297, the last six 0.8703.
    assert row["Reward, first → last tenth"] == "0.23 → 0.87"
    assert row["Held-out accuracy, first → last"] == "0.300 (0.250, 0.350) → 0.900 (0.850, 0.950)"
    assert row["Completion tokens, first → last tenth"] == "8.83 → 5.17"
    assert row["Seconds a step"] == "2"
    assert (row["Recipe"], row["Compute dtype"], row["Steps"]) == ("fp8-rl", "float32", "60")


def test_an_unfinished_run_says_how_far_it_got(tmp_path):
    run = write_run(tmp_path / "run", "bf16", steps=60)
    lines = (run / "metrics.jsonl").read_text().splitlines()[:20]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert headline(read_arms([run])[0])["Steps"] == "20 of 60"


def test_phases_add_up_to_the_step_without_the_first(arms):
    assert phase_seconds(arms[0]) == pytest.approx(
        {"generation": 1.0, "update": 0.5, "weight sync": 0.1, "other": 0.4}
    )


def test_a_table_has_the_seconds_of_the_bars(tmp_path):
    """Where steps are uneven, too: every tenth evaluates."""
    run = write_run(tmp_path / "run", "bf16", steps=60)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows[1:60:10]:
        row |= {"time/eval": 18.0, "time/step": row["time/step"] + 18.0}
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (arm,) = read_arms([run])
    assert step_seconds(arm) == [pytest.approx(sum(phase_seconds(arm).values()))]
    assert headline(arm)["Seconds a step"] == "3.83"  # 2 + 18 * 6 / 59
    assert "3.83 s" in timing_chart([arm]).svg


def test_only_differences_of_the_configuration_are_listed(arms):
    assert config_differences(arms) == [
        ("output", ['"bf16"', '"fp8-rl"']),
        ("recipe", ['"bf16"', '"fp8-rl"']),
    ]


def test_samples_are_those_of_the_first_and_last_step(arms):
    (first, early), (last, late) = sample_pairs(arms[0].runs[0])
    assert (first, last) == (0, 59)
    assert [sample["completion"] for sample in late] == ["completion of step 59"]
    assert early[1]["completion"].endswith("x… (1000 more characters)")
    assert early[1]["answer"] == "–" and early[1]["reward"] == "0.125"


def test_zeros_are_noted_where_a_logarithm_cannot_show_them(arms):
    (k3,) = (curve for curve in CURVES if curve.key == "mismatch/k3")
    assert (
        "bf16 recipe, float32 compute: 0 at 60 of 60 steps, not drawn."
        in curve_chart(k3, arms).about
    )


def test_every_run_is_called_by_its_recipe_and_compute_dtype(tmp_path):
    """Two runs of one recipe and two dtypes have two names in every legend, table, title and
    chart."""
    first, second = (
        write_run(tmp_path / "bf16", "bf16"),
        write_run(tmp_path / "other", "bf16", dtype="bfloat16"),
    )
    arms = read_arms([first, second])
    labels = ["bf16 recipe, float32 compute", "other (bf16 recipe, bfloat16 compute)"]
    assert [arm.label for arm in arms] == labels
    page = render(arms)
    text = Elements(page).text
    assert f"<title>{labels[0]} and {labels[1]}" in page
    # the legend; samples, timing and configuration; its details
    assert all(text.count(label) >= 5 for label in labels)
    assert ">float32 compute</text>" in page and ">bfloat16 compute</text>" in page
    legend = re.findall(r"<button[^>]*>.*?</svg>(.*?)</button>", page)
    assert legend == labels and ">single steps</button>" in page
    named = legend + re.findall(r"<th>(.*?)</th>", page)
    assert "bf16" not in named
    assert config_differences(arms)[0] == ("compute_dtype", ['"float32"', '"bfloat16"'])


def test_text_of_the_runs_is_escaped(arms):
    page = Elements(render(arms))
    assert page.tags.count("script") == 2 and "b" not in page.tags  # the page's numbers and its own
    assert PROMPT in page.text


@pytest.mark.parametrize(
    "written",
    [
        "<script>alert(1)</script>",
        "</pre><img src=x onerror=alert(1)>",
        "</pre></section></body></html><iframe src='https://example.org'>",
        "{{ 7 * 7 }}{% raw %}&lt;b&gt;",
        '" onmouseover="alert(1)',
    ],
)
def test_what_a_model_wrote_is_text_on_the_page(tmp_path, written):
    """In a completion, in the prompt of a later turn, and in the answer of a problem."""
    run = write_run(tmp_path / "run", "bf16")
    plain = Elements(render(read_arms([run])))
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"completion": written, "prompt": f"2 + 2 = {written}", "answer": written}
    (run / "samples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    page = Elements(write_report([run], tmp_path / "report.html").read_text())
    assert set(page.tags) == set(plain.tags) and page.text.count(written) >= 3
    assert {name for name, _ in page.attributes} == {name for name, _ in plain.attributes}


def test_the_page_refers_to_nothing_outside_itself(arms):
    page = render(arms)
    elements = Elements(page)
    links = [
        value
        for name, value in elements.attributes
        if name in ("href", "src", "srcset", "data", "action", "xlink:href")
    ]
    assert all(link.startswith("#") for link in links)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))
    assert not {"link", "iframe", "img", "object"} & set(elements.tags)
    # nothing runs but the page's own script, whose hash its policy names
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page and page.count("<script") == 2
    assert "@import" not in page and "http:" not in page and "https:" not in page


def test_ids_are_unique_and_references_resolve(arms):
    page = render(arms)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', page)) <= set(ids)


def test_the_same_runs_give_the_same_page(arms):
    assert render(arms) == render(arms)


def test_colours_are_those_of_the_page_and_dashes_tell_arms_beyond_the_palette_apart(tmp_path):
    arms = read_arms([write_run(tmp_path / f"arm{index}", "bf16", steps=5) for index in range(8)])
    page = render(arms)
    assert "#0a0" not in page
    assert set(re.findall(r"var\((--[a-z]+\d*)\)", page)) <= set(
        re.findall(r"(--[a-z]+\d*):", page)
    )
    svg = curve_chart(CURVES[0], arms).svg
    assert (
        len(
            re.findall(
                r"stroke-dasharray: \d[^;]*; stroke-dashoffset: 0; stroke: var\(--arm[01]\)", svg
            )
        )
        == 2
    )


def test_a_run_with_little_in_it_still_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.5}\n')
    page = Elements(render(read_arms([tmp_path])))
    assert page.text.count("No run logged this.") == sum(not curve.optional for curve in CURVES) + 1
    assert "This run kept no samples." in page.text


def test_the_command_writes_the_page_beside_the_runs(tmp_path, capsys):
    write_run(tmp_path / "bf16", "bf16", steps=5)
    assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf16", "report.html"]
    assert cli.main(["report", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err == f"fp8rl: error: {tmp_path / 'nothing'}: no such directory\n"


def test_a_page_that_cannot_be_written_is_named(tmp_path):
    write_run(tmp_path / "bf16", "bf16", steps=5)
    with pytest.raises(
        UserError, match="nowhere/report.html: cannot be written: No such file or directory"
    ):
        write_report([tmp_path], tmp_path / "nowhere" / "report.html")
