// The page: a slide's images, the field that is shown, the operating point, and the slide's result.

import { fetchModel, fetchSlide } from "./api.js";
import { CELL_STATES, countClasses, countFlagged } from "./cells.js";
import { ZOOM_STEP, addControls } from "./controls.js";
import { byId, capitalize, h } from "./dom.js";
import { Fields } from "./fields.js";
import { showList } from "./list.js";
import { showMontage } from "./montage.js";
import { saveResult } from "./saving.js";
import { showCounts, showNoResult, showSlide } from "./slide.js";
import { Slider } from "./slider.js";
import { Viewer } from "./viewer.js";

const NARROW_PX = 832; // as in page.css

const showError = (text) => {
  byId("error").hidden = !text;
  byId("error").textContent = text ?? "";
};

class Page {
  constructor(model) {
    this.model = model;
    this.shown = null;
    this.slide = null;
    this.lastRequest = 0; // number of the latest request for the result: late answers to earlier ones are dropped
    this.hiddenStates = new Set();
    this.fields = new Fields(model, () => this.refresh());
    this.viewer = new Viewer(model, this.hiddenStates);
    this.slider = new Slider(model, () => this.refresh());
    addControls(this.viewer);
    byId("counting").open = window.innerWidth > NARROW_PX;
    this.describeModel();
    this.addListeners();
    this.refresh();
  }

  describeModel() {
    const { model } = this;
    byId("model").textContent = model.title;
    byId("notice").textContent = capitalize(model.notice);
    const facts = {
      model: `${model.title}, ${model.precision}`,
      "signed by": model.signer,
      digest: model.digest,
      classes: model.classes.join(", "),
      "positive class": model.positive_class ?? "none",
      "calibrated on": `${model.calibrated_on}${model.has_local_calibration ? ": local calibration" : ""}`,
    };
    byId("facts").replaceChildren(...Object.entries(facts).flatMap(([label, value]) => [h("dt", null, label), h("dd", null, value)]));
    byId("card").textContent = model.card;
    const checkbox = (state) =>
      h("label", { class: state }, h("input", { type: "checkbox", checked: true, onchange: (event) => this.toggleState(state, event.target.checked) }), h("span", { class: "swatch", "aria-hidden": "true" }), CELL_STATES[state].label);
    const states = Object.keys(CELL_STATES).filter((state) => state !== "flagged" || model.positive_class !== null);
    byId("legend").replaceChildren(...states.map(checkbox));
  }

  toggleState(state, isVisible) {
    isVisible ? this.hiddenStates.delete(state) : this.hiddenStates.add(state);
    this.viewer.draw();
  }

  refresh() {
    const { model, fields, slider } = this;
    const done = fields.done;
    if (!done.includes(this.shown)) this.openField(done[0] ?? null);
    this.viewer.setPoint(slider.point);
    byId("drop").hidden = fields.all.length > 0;
    byId("waiting").hidden = !fields.all.length || done.length > 0;
    byId("waiting").textContent = fields.isReading ? "Reading the first image …" : "None of these images could be read";
    byId("choose").hidden = fields.all.length === 0;
    byId("restart").hidden = fields.all.length === 0;
    this.showImages();
    this.updateResult(done);
  }

  showImages() {
    const { model, fields, slider } = this;
    showList(fields.all, this.shown, slider.point, model, {
      open: (field) => this.openField(field),
      remove: (field) => this.fields.remove(field),
      retry: (field) => this.fields.retry(field),
    });
    const counted = fields.done.filter((field) => field.duplicateOf === null);
    showMontage(counted, slider.point, model, (field, index) => this.openField(field, index));
  }

  /** Marks the result as outdated until the service has answered. */
  async updateResult(done) {
    const requestNumber = ++this.lastRequest;
    this.setPending(true);
    await this.showResult(done, requestNumber);
    if (requestNumber === this.lastRequest) this.setPending(false);
  }

  setPending(isPending) {
    byId("slide").setAttribute("aria-busy", isPending);
    byId("save").disabled = byId("print").disabled = isPending; // new flags must not be saved with an old verdict
  }

  async showResult(done, requestNumber) {
    const { model, slider } = this;
    if (!done.length) {
      this.slide = null;
      showError(null);
      return showNoResult("No cells yet", "Add images to see the result.");
    }
    try {
      const slide = await fetchSlide(this.slideRequest(done));
      if (requestNumber !== this.lastRequest) return;
      this.slide = slide;
      this.markDuplicates(done, slide.duplicate_of);
      if (model.positive_class === null) {
        const counted = done.filter((field) => field.duplicateOf === null).map((field) => field.image);
        showCounts(slide, countClasses(counted, slider.point, model), model, this.notes());
      } else showSlide(slide, model, this.notes());
      showError(null);
    } catch (error) {
      if (requestNumber !== this.lastRequest) return;
      this.slide = null; // the shown result belongs to other images
      showError(capitalize(error.message));
      showNoResult("No result", capitalize(error.message));
    }
  }

  slideRequest(done) {
    const { point } = this.slider;
    const failed = this.fields.all.filter((field) => field.state === "failed");
    return {
      images: done.map(({ image }) => ({ ...image.summary, num_flagged: countFlagged(image, point) })),
      failures: failed.map((field) => ({ name: field.name, reason: field.error })),
      log_odds: point?.log_odds ?? null,
    };
  }

  /** The service says which images show the same pixels as an earlier one. */
  markDuplicates(done, duplicateOf) {
    const hasChanged = done.some((field, n) => field.duplicateOf !== duplicateOf[n]);
    done.forEach((field, n) => (field.duplicateOf = duplicateOf[n]));
    if (hasChanged) this.showImages();
  }

  /** Warns while images are still to be read. */
  notes() {
    const numPending = this.fields.all.filter((field) => field.state === "waiting" || field.state === "reading").length;
    return numPending ? [`incomplete: ${numPending} of ${this.fields.all.length} images are still to be read`] : [];
  }

  /** The title changes only when the new image is drawn, so that title and cells always belong together. */
  async openField(field, cellIndex = null) {
    this.shown = field;
    if (field === null) return (byId("viewer").hidden = true);
    for (const button of document.querySelectorAll("#list .pick")) {
      if (button.id === `open-${field.id}`) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
    if (this.viewer.field !== field) {
      const bitmap = await createImageBitmap(field.source);
      if (this.shown !== field) return bitmap.close();
      byId("viewer").hidden = false; // a hidden canvas has no size to fit into
      byId("shown-title").textContent = field.name;
      this.viewer.show(field, bitmap);
    }
    if (cellIndex === null) return;
    this.viewer.goTo(cellIndex, true);
    this.viewer.canvas.focus();
  }

  addListeners() {
    const files = byId("files");
    for (const id of ["choose", "choose-first"]) byId(id).addEventListener("click", () => files.click());
    files.addEventListener("change", () => {
      this.fields.add([...files.files]);
      files.value = ""; // allows choosing the same file again after it was removed
    });
    byId("restart").addEventListener("click", () => {
      if (!window.confirm("Start a new slide? The images and the result on this page are discarded.")) return;
      this.fields.clear();
      if (this.slider.point) this.slider.setIndex(this.slider.defaultIndex);
    });
    byId("save").addEventListener("click", () => saveResult(this.fields.all, this.slide, this.slider.point, this.model));
    window.addEventListener("beforeprint", () => (byId("counting").open = true));
    byId("print").addEventListener("click", () => window.print());
    byId("zoom-in").addEventListener("click", () => this.viewer.zoom(ZOOM_STEP));
    byId("zoom-out").addEventListener("click", () => this.viewer.zoom(1 / ZOOM_STEP));
    byId("zoom-fit").addEventListener("click", () => this.viewer.fit());
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    for (const name of ["dragenter", "dragover"])
      window.addEventListener(name, (event) => {
        if (!hasFiles(event)) return;
        event.preventDefault();
        document.body.classList.add("dropping");
      });
    window.addEventListener("dragleave", (event) => event.relatedTarget ?? document.body.classList.remove("dropping"));
    window.addEventListener("drop", (event) => {
      document.body.classList.remove("dropping");
      if (!hasFiles(event)) return;
      event.preventDefault(); // otherwise the browser opens the image instead of the page
      this.fields.add([...event.dataTransfer.files]);
    });
  }
}

try {
  new Page(await fetchModel());
} catch (error) {
  showError(capitalize(error.message));
  throw error;
}
