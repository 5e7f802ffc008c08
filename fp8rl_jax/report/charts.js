"use strict";
// The legend shows and hides arms, seeds and bands; a pointer over a chart reads its numbers.
const numbers = JSON.parse(document.getElementById("numbers").textContent);
const buttons = [...document.querySelectorAll("#legend button")];
const arms = buttons.filter((button) => button.dataset.arm !== undefined);
const shown = (button) => button.getAttribute("aria-pressed") === "true";

for (const button of buttons) {
  button.disabled = false;
  button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", String(!shown(button)));
    if (button.dataset.layer) {
      document.body.classList.toggle(`no-${button.dataset.layer}`, !shown(button));
      return;
    }
    for (const part of document.querySelectorAll(`figure svg [data-arm="${button.dataset.arm}"]`))
      part.style.display = shown(button) ? "" : "none";
  });
}

const text = (value) => {
  const size = Math.abs(value);
  if (size && (size < 1e-4 || size >= 1e6)) return value.toExponential(2);
  return size < 1000 ? String(Number(value.toPrecision(3))) : value.toFixed(0);
};

function element(name, content, parent) {
  const made = document.createElement(name);
  made.textContent = content;
  parent.append(made);
  return made;
}

for (const [name, chart] of Object.entries(numbers.charts)) {
  const figure = document.getElementById(`chart-${name}`);
  const svg = figure.querySelector(":scope > svg");
  const [left, top, right, bottom] = chart.box;
  const [first, last] = chart.steps;
  const steps = [...new Set(Object.values(chart.arms).flat().map((row) => row[0]))];
  const rows = Object.fromEntries(Object.entries(chart.arms).map(
    ([arm, points]) => [arm, new Map(points.map((row) => [row[0], row]))]));
  const tip = element("div", "", figure);
  tip.className = "tip";
  tip.hidden = true;
  const line = document.createElementNS(svg.namespaceURI, "line");
  line.classList.add("cursor");
  line.setAttribute("y1", top);
  line.setAttribute("y2", bottom);
  line.style.display = "none";
  svg.append(line);
  let seeds = null;

  const paths = () => [...svg.querySelectorAll("g.seed")].map((group) => {
    const path = group.querySelector(":scope > path");
    const flat = path ? path.getAttribute("d").match(/-?[\d.]+/g).map(Number) : [];
    return {group, flat};
  });

  function nearest(x, y) {
    let best = null, least = 9;
    for (const {group, flat} of seeds) {
      if (group.style.display === "none") continue;
      for (let i = 0; i + 1 < flat.length; i += 2) {
        const distance = Math.hypot(flat[i] - x, flat[i + 1] - y);
        if (distance < least) [best, least] = [group, distance];
      }
    }
    return best;
  }

  function hide() {
    tip.hidden = true;
    line.style.display = "none";
    for (const group of svg.querySelectorAll("g.near")) group.classList.remove("near");
  }

  function show(event) {
    const place = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    const x = (event.clientX - place.left) * view.width / place.width;
    const y = (event.clientY - place.top) * view.height / place.height;
    hide();
    if (x < left - 4 || x > right + 4 || !steps.length) return;
    const wanted = first + (x - left) / (right - left) * (last - first);
    const step = steps.reduce((a, b) => Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a);
    const at = left + (step - first) / (last - first) * (right - left);
    line.setAttribute("x1", at);
    line.setAttribute("x2", at);
    line.style.display = "";
    tip.replaceChildren();
    element("b", `step ${step}`, tip);
    for (const button of arms) {
      const row = rows[button.dataset.arm]?.get(step);
      if (!row || !shown(button)) continue;
      const [, mean, low, high, seeds] = row;
      const around = low < high ? ` (${text(low)}, ${text(high)})` : "";
      const shownRow = element("div", "", tip);
      shownRow.append(button.querySelector("svg").cloneNode(true));
      element("span", `${button.textContent.trim()}: ${text(mean)}${around}`, shownRow);
      if (seeds < numbers.seeds[button.dataset.arm].length)
        element("span", ` ${seeds} of ${numbers.seeds[button.dataset.arm].length} seeds`, shownRow);
    }
    seeds ??= paths();
    const near = document.body.classList.contains("no-seeds") ? null : nearest(x, y);
    if (near) {
      near.classList.add("near");
      const arm = near.dataset.arm, seed = numbers.seeds[arm][near.dataset.seed];
      element("i", `nearest: ${arms[arm].textContent.trim()}, seed ${seed}`, tip);
    }
    tip.hidden = false;
    const space = figure.clientWidth - tip.offsetWidth - 8;
    const beside = place.left - figure.getBoundingClientRect().left + at * place.width / view.width;
    tip.style.left = `${Math.max(8, Math.min(space, beside + 12 > space ? beside - tip.offsetWidth - 12 : beside + 12))}px`;
    tip.style.top = `${svg.offsetTop === undefined ? place.top - figure.getBoundingClientRect().top : svg.offsetTop}px`;
  }

  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
}
