// The slider of operating points: the threshold from which a cell is flagged. Moving it reads no image again.

import { byId, formatCount, formatPercent, formatProbability, h } from "./dom.js";

export class Slider {
  constructor(model, onChange) {
    this.model = model;
    this.onChange = onChange;
    this.steps = model.curve;
    this.defaultIndex = this.steps.findIndex((step) => step.log_odds === model.default_point?.log_odds);
    this.index = this.defaultIndex;
    if (this.point) this.build();
  }

  /** null if the model has no operating points. */
  get point() {
    return this.steps[this.index] ?? null;
  }

  build() {
    const last = this.steps.length - 1;
    this.input = h("input", {
      id: "slider", type: "range", min: 0, max: last, step: 1, value: this.index, "aria-describedby": "rates",
      oninput: () => this.setIndex(Number(this.input.value)),
    });
    this.rates = h("div", { id: "rates" });
    this.back = h("button", { type: "button", id: "default", onclick: () => this.setIndex(this.defaultIndex) }, "Back to default");
    const marks = h("div", { class: "marks", role: "group", "aria-label": "Named operating points" });
    this.named = this.model.operating_points.map((point) => {
      const index = this.steps.findIndex((step) => step.log_odds === point.log_odds);
      const mark = h("button", { type: "button", class: index === this.defaultIndex ? "start" : null, onclick: () => this.setIndex(index) }, point.name);
      mark.style.setProperty("--place", last ? index / last : 0);
      marks.append(mark);
      return { index, mark };
    });
    byId("point").replaceChildren(
      h("div", { class: "line" }, h("label", { for: "slider" }, "When a cell is flagged"), this.back),
      h("div", { class: "track" }, this.input, marks),
      h("div", { class: "ends", "aria-hidden": "true" }, h("span", null, "fewer false alarms"), h("span", null, "fewer misses")),
      this.rates,
    );
    this.describe();
  }

  setIndex(index) {
    this.index = index;
    this.input.value = index;
    this.describe();
    this.onChange(this.point);
  }

  describe() {
    const { point } = this;
    const name = point.name || "chosen";
    this.input.setAttribute("aria-valuetext", `${name}, probability ${formatProbability(point.probability)}`);
    this.back.disabled = this.index === this.defaultIndex;
    for (const { index, mark } of this.named) mark.setAttribute("aria-pressed", index === this.index);
    const truePositives = `${formatCount(point.tp)} of ${formatCount(point.tp + point.fn)}`;
    const trueNegatives = `${formatCount(point.tn)} of ${formatCount(point.tn + point.fp)}`;
    const row = (label, value, detail) => h("div", null, h("dt", null, label), h("dd", null, h("strong", null, value), " ", detail));
    this.rates.replaceChildren(
      h(
        "dl",
        null,
        row("probability", `≥ ${formatProbability(point.probability)}`, `(${name})`),
        row("sensitivity", formatPercent(point.sensitivity), `(found ${truePositives})`),
        row("specificity", formatPercent(point.specificity, 2), `(passed ${trueNegatives})`),
      ),
    );
  }
}
