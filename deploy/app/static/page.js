// The page: a slide's pictures, the one that is shown, the operating point, and the result that follows from them.

import { about as askAbout, verdict } from "./api.js";
import { KINDS, tally } from "./cells.js";
import { by, capital, h } from "./dom.js";
import { Fields } from "./fields.js";
import { showList } from "./list.js";
import { showMontage } from "./montage.js";
import { save } from "./saving.js";
import { showCounts, showSlide } from "./slide.js";
import { Slider } from "./slider.js";
import { STEP, steer } from "./steering.js";
import { Viewer } from "./viewer.js";

const NARROW = 832; // as in page.css

const trouble = (text) => {
  by("trouble").hidden = !text;
  by("trouble").textContent = text ?? "";
};

class Page {
  constructor(about) {
    this.about = about;
    this.shown = null;
    this.slide = null;
    this.asked = 0; // of verdicts: a late answer to an old question is dropped
    this.hidden = new Set();
    this.fields = new Fields(about, () => this.refresh());
    this.viewer = new Viewer(about, this.hidden);
    this.slider = new Slider(about, () => this.refresh());
    steer(this.viewer);
    by("counting").open = window.innerWidth > NARROW;
    this.describe();
    this.listen();
    this.refresh();
  }

  describe() {
    const { about } = this;
    by("model").textContent = about.title;
    by("notice").textContent = capital(about.notice);
    const facts = {
      model: `${about.title}, ${about.precision}`,
      "signed by": about.signer,
      digest: about.digest,
      classes: about.classes.join(", "),
      "what matters": about.positive ?? "no class more than others",
      "calibrated on": `${about.calibrated}${about.lab ? ": this lab's own measurement" : ""}`,
    };
    by("facts").replaceChildren(...Object.entries(facts).flatMap(([what, said]) => [h("dt", null, what), h("dd", null, said)]));
    by("card").textContent = about.card;
    const tick = (kind) =>
      h("label", { class: kind }, h("input", { type: "checkbox", checked: true, onchange: (event) => this.toggle(kind, event.target.checked) }), h("span", { class: "swatch", "aria-hidden": "true" }), KINDS[kind].words);
    const kinds = Object.keys(KINDS).filter((kind) => kind !== "flagged" || about.positive !== null);
    by("legend").replaceChildren(...kinds.map(tick));
  }

  toggle(kind, on) {
    on ? this.hidden.delete(kind) : this.hidden.add(kind);
    this.viewer.draw();
  }

  refresh() {
    const { about, fields, slider } = this;
    const done = fields.done;
    if (!done.includes(this.shown)) this.open(done[0] ?? null);
    this.viewer.at(slider.point);
    by("drop").hidden = fields.all.length > 0;
    by("waiting").hidden = !fields.all.length || done.length > 0;
    by("waiting").textContent = fields.busy ? "Reading the first picture …" : "None of these pictures could be read";
    by("choose").hidden = fields.all.length === 0;
    by("restart").hidden = fields.all.length === 0;
    showList(fields.all, this.shown, slider.point, about, {
      open: (field) => this.open(field),
      remove: (field) => this.fields.remove(field),
      again: (field) => this.fields.again(field),
    });
    showMontage(done, slider.point, about, (field, place) => this.open(field, place));
    this.judge(done);
  }

  /** Until the answer is there, the result is marked as one of other counts. */
  async judge(done) {
    const turn = ++this.asked;
    this.pending(true);
    await this.show(done, turn);
    if (turn === this.asked) this.pending(false);
  }

  pending(on) {
    by("slide").setAttribute("aria-busy", on);
    by("save").disabled = by("print").disabled = on; // new flags beside an old verdict must not be kept
  }

  async show(done, turn) {
    const { about, slider } = this;
    const found = tally(done.map((field) => field.picture), slider.point, about);
    if (!done.length || about.positive === null) {
      this.slide = null;
      return done.length ? showCounts(found, about, this.notes()) : showSlide(null, about);
    }
    const { classes: _, ...counts } = found;
    const traits = done.map((field) => field.picture.traits).filter(Boolean);
    const diameters = done.map((field) => field.picture.diameter).filter(Boolean);
    const singles = done.filter((field) => field.picture.kind === "cell").length;
    try {
      const told = await verdict({ ...counts, log_odds: slider.point?.log_odds ?? null, traits, diameters, singles });
      if (turn !== this.asked) return;
      this.slide = told;
      showSlide(told, about, this.notes());
      trouble(null);
    } catch (error) {
      if (turn === this.asked) trouble(capital(error.message)); // what is shown belongs to other counts
      if (turn === this.asked) showSlide((this.slide = null), about);
    }
  }

  /** A result of some of the pictures must not be taken for that of all. */
  notes() {
    const having = (...states) => this.fields.all.filter((field) => states.includes(field.state)).length;
    const [left, bad] = [having("waiting", "reading"), having("failed")];
    return [
      left ? `not complete: ${left} of ${this.fields.all.length} pictures still to be read` : null,
      bad ? `${bad} of ${this.fields.all.length} pictures could not be read: the result is without ${bad === 1 ? "it" : "them"}` : null,
    ].filter(Boolean);
  }

  /** The old picture keeps its name until the new one is drawn: title and cells always belong together. */
  async open(field, place = null) {
    this.shown = field;
    if (field === null) return (by("viewer").hidden = true);
    for (const button of document.querySelectorAll("#list .pick")) {
      if (button.id === `open-${field.id}`) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
    if (this.viewer.field !== field) {
      const bitmap = await createImageBitmap(field.source);
      if (this.shown !== field) return bitmap.close();
      by("viewer").hidden = false; // a hidden canvas has no size to fit into
      by("shown-title").textContent = field.name;
      this.viewer.show(field, bitmap);
    }
    if (place === null) return;
    this.viewer.goTo(place, true);
    this.viewer.canvas.focus();
  }

  listen() {
    const files = by("files");
    for (const id of ["choose", "choose-first"]) by(id).addEventListener("click", () => files.click());
    files.addEventListener("change", () => {
      this.fields.add([...files.files]);
      files.value = ""; // the same file may be chosen again once it was removed
    });
    by("restart").addEventListener("click", () => {
      if (!window.confirm("Start a new slide? The pictures and the result on this page are forgotten.")) return;
      this.fields.clear();
      if (this.slider.point) this.slider.go(this.slider.start);
    });
    by("save").addEventListener("click", () => save(this.fields.all, this.slide, this.slider.point, this.about));
    window.addEventListener("beforeprint", () => (by("counting").open = true));
    by("print").addEventListener("click", () => window.print());
    by("zoom-in").addEventListener("click", () => this.viewer.zoom(STEP));
    by("zoom-out").addEventListener("click", () => this.viewer.zoom(1 / STEP));
    by("zoom-fit").addEventListener("click", () => this.viewer.fit());
    const files_in = (event) => event.dataTransfer?.types.includes("Files");
    for (const name of ["dragenter", "dragover"])
      window.addEventListener(name, (event) => {
        if (!files_in(event)) return;
        event.preventDefault();
        document.body.classList.add("dropping");
      });
    window.addEventListener("dragleave", (event) => event.relatedTarget ?? document.body.classList.remove("dropping"));
    window.addEventListener("drop", (event) => {
      document.body.classList.remove("dropping");
      if (!files_in(event)) return;
      event.preventDefault(); // a browser would leave the page for the picture
      this.fields.add([...event.dataTransfer.files]);
    });
  }
}

try {
  new Page(await askAbout());
} catch (error) {
  trouble(capital(error.message));
  throw error;
}
