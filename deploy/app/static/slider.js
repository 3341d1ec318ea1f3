// The operating point: from which score on a cell is flagged. Pictures are not read again.

import { by, count, h, percent, probability } from "./dom.js";

export class Slider {
  constructor(about, changed) {
    this.about = about;
    this.changed = changed;
    this.steps = about.curve;
    this.start = this.steps.findIndex((step) => step.log_odds === about.default?.log_odds);
    this.at = this.start;
    if (this.point) this.build();
  }

  /** None where nobody measured the model. */
  get point() {
    return this.steps[this.at] ?? null;
  }

  build() {
    const last = this.steps.length - 1;
    this.input = h("input", {
      id: "slider", type: "range", min: 0, max: last, step: 1, value: this.at, "aria-describedby": "rates",
      oninput: () => this.go(Number(this.input.value)),
    });
    this.rates = h("div", { id: "rates" });
    this.back = h("button", { type: "button", id: "default", onclick: () => this.go(this.start) }, "Back to default");
    const marks = h("div", { class: "marks", role: "group", "aria-label": "Named operating points" });
    this.named = this.about.points.map((point) => {
      const at = this.steps.findIndex((step) => step.log_odds === point.log_odds);
      const mark = h("button", { type: "button", class: at === this.start ? "start" : null, onclick: () => this.go(at) }, point.name);
      mark.style.setProperty("--place", last ? at / last : 0);
      marks.append(mark);
      return { at, mark };
    });
    by("point").replaceChildren(
      h("div", { class: "line" }, h("label", { for: "slider" }, "When a cell is flagged"), this.back),
      h("div", { class: "track" }, this.input, marks),
      h("div", { class: "ends", "aria-hidden": "true" }, h("span", null, "fewer false alarms"), h("span", null, "misses fewer")),
      this.rates,
    );
    this.tell();
  }

  go(at) {
    this.at = at;
    this.input.value = at;
    this.tell();
    this.changed(this.point);
  }

  tell() {
    const { point } = this;
    const name = point.name || "chosen";
    this.input.setAttribute("aria-valuetext", `${name}, probability ${probability(point.probability)}`);
    this.back.disabled = this.at === this.start;
    for (const { at, mark } of this.named) mark.setAttribute("aria-pressed", at === this.at);
    const own = `${count(point.tp)} of ${count(point.tp + point.fn)}`;
    const others = `${count(point.tn)} of ${count(point.tn + point.fp)}`;
    const row = (what, value, words) => h("div", null, h("dt", null, what), h("dd", null, h("strong", null, value), " ", words));
    this.rates.replaceChildren(
      h(
        "dl",
        null,
        row("probability", `≥ ${probability(point.probability)}`, `(${name})`),
        row("sensitivity", percent(point.sensitivity), `(found ${own})`),
        row("specificity", percent(point.specificity, 2), `(passed ${others})`),
      ),
    );
  }
}
