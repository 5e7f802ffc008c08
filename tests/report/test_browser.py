"""The page in a real browser: it opens without a network and fits a desktop and a phone."""

import html
import json
import re
import subprocess

import pytest
from report.synthetic import write_comparison, write_run

from fp8rl_jax.report.charts import CURVES
from fp8rl_jax.report.page import write_report

MEASURE = """<!doctype html><meta charset="utf-8">
<iframe style="border: 0; width: {width}px; height: 900px" srcdoc="{page}"></iframe>
<pre id="result"></pre>
<script>
document.querySelector("iframe").addEventListener("load", (event) => {{
  const page = event.target.contentDocument, root = page.documentElement;
  const drawn = [...page.querySelectorAll("figure > svg")].filter((svg) => svg.getBoundingClientRect().height > 100);
  document.getElementById("result").textContent = JSON.stringify({{
    width: root.clientWidth,
    scroll: root.scrollWidth,
    charts: drawn.map((svg) => svg.parentElement.id),
    lines: drawn.map((svg) => [...svg.querySelectorAll("path")].filter((path) =>
      page.defaultView.getComputedStyle(path).stroke.startsWith("rgb")
      && path.style.stroke.startsWith("var(--arm")).length),
    resources: page.defaultView.performance.getEntriesByType("resource").map((entry) => entry.name),
  }});
}});
</script>"""


def browse(chromium, tmp_path, *arguments):
    profile = tmp_path / "profile"
    command = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture
def page(tmp_path):
    """Two runs, one of them with a name and samples that do not break by themselves, and a
    comparison beside the other."""
    write_comparison(write_run(tmp_path / "runs" / "bf16", "bf16", k3=3e-6))
    write_run(tmp_path / "runs" / f"fp8-rl-{'very' * 12}-long-name", "fp8-rl")
    return write_report([tmp_path / "runs"], tmp_path / "report.html")


@pytest.mark.parametrize("width", [1920, 1200, 480, 400])
def test_the_page_fits_and_every_chart_is_drawn(chromium, tmp_path, page, width):
    measure = tmp_path / "measure.html"
    measure.write_text(MEASURE.format(width=width, page=html.escape(page.read_text())))
    dom = browse(chromium, tmp_path, "--window-size=1400,1000", "--dump-dom", measure.as_uri())
    (result,) = re.findall(r'<pre id="result">(.*?)</pre>', dom)
    found = json.loads(html.unescape(result))
    assert found["scroll"] <= found["width"]
    assert width - 20 <= found["width"] <= width
    curves = [f"chart-{re.sub('[^a-z0-9]', '-', curve.key).replace('_', '-')}" for curve in CURVES]
    assert found["charts"] == [
        *curves,
        "chart-timing",
        "chart-compare-0-own",
        "chart-compare-0-output",
    ]
    assert all(lines >= 2 for lines in found["lines"][: len(CURVES)])
    assert found["resources"] == []


def test_it_opens_from_a_file_and_paints(chromium, tmp_path, page):
    picture = tmp_path / "page.png"
    browse(chromium, tmp_path, "--window-size=1200,1600", f"--screenshot={picture}", page.as_uri())
    assert picture.read_bytes().startswith(b"\x89PNG")
    # An empty page of this size compresses to about 10 kB.
    assert picture.stat().st_size > 50_000
