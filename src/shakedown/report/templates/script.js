"use strict";
(() => {
  const root = document.documentElement;
  const dark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  // A page opened from a data: address has no storage; the choice then lasts as long as the page.
  const stored = (value) => {
    try {
      if (value) localStorage.setItem("shakedown-theme", value);
      return localStorage.getItem("shakedown-theme");
    } catch {
      return null;
    }
  };
  const chosen = stored();
  if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    stored(root.dataset.theme);
  });

  for (const button of document.querySelectorAll("button.copy")) {
    const command = button.parentElement.querySelector("code");
    if (!navigator.clipboard) continue;
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(command.textContent);
      button.textContent = "copied";
      setTimeout(() => (button.textContent = "copy"), 1500);
    });
  }

  // A link to a place inside a closed <details> opens it.
  const reveal = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
  };
  addEventListener("hashchange", reveal);
  reveal();

  // Crosshair: the charts of one stage move together, by pointer, finger or arrow keys.
  const nearest = (steps, step) => {
    let low = 0;
    let high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1;
      else high = middle;
    }
    return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
  };

  class Chart {
    constructor(figure) {
      const lines = [...figure.querySelectorAll("path.line")].reverse();
      this.curves = JSON.parse(figure.dataset.curves).map((curve, index) => {
        const xy = (lines[index].getAttribute("d").match(/[\d.]+/g) || []).map(Number);
        return { ...curve, xs: xy.filter((_, i) => i % 2 === 0), ys: xy.filter((_, i) => i % 2) };
      });
      this.svg = figure.querySelector("svg");
      this.cursor = figure.querySelector(".cursor");
      this.step = figure.querySelector("figcaption p b");
      this.outputs = [...figure.querySelectorAll("figcaption li b")];
      this.lastStep = this.step.textContent;
      this.rest = this.outputs.map((output) => output.textContent);
      this.ends = [...figure.querySelectorAll("circle.end")].reverse();
      this.longest = this.curves.reduce((a, b) => (b.steps.length > a.steps.length ? b : a));
    }
    stepAt(clientX) {
      const box = this.svg.getBoundingClientRect();
      const x = ((clientX - box.left) / box.width) * this.svg.viewBox.baseVal.width;
      return this.longest.steps[nearest(this.longest.xs, x)];
    }
    show(step) {
      const at = nearest(this.longest.steps, step);
      this.at = at;
      this.cursor.setAttribute("d", `M${this.longest.xs[at]} 10V146`);
      this.curves.filter((curve) => curve.steps.length).forEach((curve, index) => {
        const i = nearest(curve.steps, step);
        this.outputs[this.curves.indexOf(curve)].textContent = curve.values[i];
        this.ends[index].setAttribute("cx", curve.xs[i]);
        this.ends[index].setAttribute("cy", curve.ys[i]);
      });
      this.step.textContent = this.longest.steps[at].toLocaleString("en");
    }
    clear() {
      this.at = undefined;
      this.cursor.setAttribute("d", "");
      this.step.textContent = this.lastStep;
      this.outputs.forEach((output, index) => (output.textContent = this.rest[index]));
      this.curves.filter((curve) => curve.steps.length).forEach((curve, index) => {
        this.ends[index].setAttribute("cx", curve.xs[curve.xs.length - 1]);
        this.ends[index].setAttribute("cy", curve.ys[curve.ys.length - 1]);
      });
    }
  }

  for (const section of document.querySelectorAll("section")) {
    const charts = [...section.querySelectorAll("figure.chart")]
      .map((figure) => new Chart(figure))
      .filter((chart) => chart.longest.steps.length);
    const show = (step) => charts.forEach((chart) => chart.show(step));
    const clear = () => charts.forEach((chart) => chart.clear());
    for (const chart of charts) {
      chart.svg.addEventListener("pointermove", (event) => show(chart.stepAt(event.clientX)));
      chart.svg.addEventListener("pointerleave", clear);
      chart.svg.addEventListener("blur", clear);
      chart.svg.addEventListener("keydown", (event) => {
        const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!move) return;
        event.preventDefault();
        const last = chart.longest.steps.length - 1;
        const from = chart.at ?? (move > 0 ? -1 : last + 1);
        show(chart.longest.steps[Math.min(last, Math.max(0, from + move))]);
      });
    }
  }
})();
