// The images of a slide, read one after the other; one that cannot be read does not stop the others.

import { blobFromDataUrl, readImages, sha256 } from "./api.js";
import { drawThumbnail, drawTiles } from "./drawing.js";

let lastId = 0;

export class Fields {
  constructor(model, onChange) {
    this.model = model;
    this.onChange = onChange; // called after every step
    this.all = []; // {id, name, file, state: waiting | reading | done | failed, error, canRetry, sha256, duplicateOf, image, source, thumbnail, tiles}
    this.isReading = false;
  }

  get done() {
    return this.all.filter((field) => field.state === "done");
  }

  add(files) {
    this.all.push(...[...files].map((file) => ({ ...NEW_FIELD, id: ++lastId, name: file.name, file })));
    this.readWaiting();
  }

  retry(field) {
    Object.assign(field, { state: "waiting", error: null });
    this.readWaiting();
  }

  remove(field) {
    this.all = this.all.filter((other) => other !== field);
    this.onChange();
  }

  clear() {
    this.all = [];
    this.onChange();
  }

  async readWaiting() {
    this.onChange();
    if (this.isReading) return;
    this.isReading = true;
    for (let field; (field = this.all.find((one) => one.state === "waiting")); ) {
      field.state = "reading";
      this.onChange();
      try {
        const results = await this.read(field);
        const index = this.all.indexOf(field);
        if (index >= 0) this.all.splice(index, 1, ...results); // else it was removed meanwhile
      } catch (error) {
        const prefix = `${field.name}: `;
        const reason = error.message.startsWith(prefix) ? error.message.slice(prefix.length) : error.message;
        Object.assign(field, { state: "failed", error: reason, canRetry: Boolean(error.canRetry) });
      }
    }
    this.isReading = false;
    this.onChange();
  }

  /** One field per frame of the file. */
  async read(field) {
    const { file } = field;
    const maxBytes = this.model.max_bytes;
    if (file.size > maxBytes) throw new Error(`larger than ${maxBytes / 1e6} MB; cut it into fields, or use \`hemofed predict\``);
    field.sha256 = await sha256(file);
    let images = await readImages(file, false);
    if (!(await isDrawable(images, file))) images = await readImages(file, true);
    return Promise.all(images.map((image, n) => this.createField(field, image, n)));
  }

  async createField(template, image, n) {
    const field = { ...template, id: n ? ++lastId : template.id, name: image.path };
    if (image.error) return { ...field, state: "failed", error: image.error.replace(`${image.path}: `, "") };
    const source = image.data_url ? blobFromDataUrl(image.data_url) : template.file;
    const bitmap = await createImageBitmap(source);
    Object.assign(field, { state: "done", image: { ...image, data_url: null }, source, thumbnail: drawThumbnail(bitmap), tiles: drawTiles(bitmap, image.cells) });
    bitmap.close();
    return field;
  }
}

const NEW_FIELD = { state: "waiting", error: null, canRetry: false, sha256: null, duplicateOf: null, image: null, source: null, thumbnail: null, tiles: [] };

/** Whether the browser draws the file with the same size as the service read it. */
async function isDrawable(images, file) {
  if (images.every((image) => image.data_url || image.error)) return true;
  try {
    const bitmap = await createImageBitmap(file);
    const isSameSize = bitmap.width === images[0].width && bitmap.height === images[0].height;
    bitmap.close();
    return isSameSize;
  } catch {
    return false;
  }
}
