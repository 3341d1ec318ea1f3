// The pictures of a slide: read one after the other; one that cannot be read does not stop the others.

import { blobOf, digestOf, read } from "./api.js";
import { thumbOf, tilesOf } from "./drawing.js";

let ids = 0;

export class Fields {
  constructor(about, changed) {
    this.about = about;
    this.changed = changed; // called after every step
    this.all = []; // {id, name, file, state: waiting | reading | done | failed, error, again, digest, picture, source, thumb, tiles}
    this.busy = false;
  }

  get done() {
    return this.all.filter((field) => field.state === "done");
  }

  add(files) {
    this.all.push(...[...files].map((file) => ({ ...EMPTY, id: ++ids, name: file.name, file })));
    this.work();
  }

  again(field) {
    Object.assign(field, { state: "waiting", error: null });
    this.work();
  }

  remove(field) {
    this.all = this.all.filter((other) => other !== field);
    this.changed();
  }

  clear() {
    this.all = [];
    this.changed();
  }

  async work() {
    this.changed();
    if (this.busy) return;
    this.busy = true;
    for (let field; (field = this.all.find((one) => one.state === "waiting")); ) {
      field.state = "reading";
      this.changed();
      try {
        const found = await this.read(field);
        const place = this.all.indexOf(field);
        if (place >= 0) this.all.splice(place, 1, ...found); // else it was removed meanwhile
      } catch (error) {
        const named = `${field.name}: `;
        const why = error.message.startsWith(named) ? error.message.slice(named.length) : error.message;
        Object.assign(field, { state: "failed", error: why, again: Boolean(error.again) });
      }
    }
    this.busy = false;
    this.changed();
  }

  /** A file of several frames becomes as many fields. */
  async read(field) {
    const { file } = field;
    if (file.size > this.about.most) throw new Error(`larger than ${this.about.most / 1e6} MB; cut it into fields, or use \`hemofed predict\``);
    const digest = await digestOf(file);
    const twin = this.all.find((other) => other !== field && other.digest === digest && other.state === "done");
    if (twin) throw new Error(`the same picture as ${twin.name}; its cells would be counted twice`);
    let pictures = await read(file, false);
    if (!(await drawable(pictures, file))) pictures = await read(file, true);
    return Promise.all(pictures.map((picture, n) => this.made(field, picture, digest, n)));
  }

  async made(field, picture, digest, n) {
    const made = { ...field, id: n ? ++ids : field.id, name: picture.path, digest };
    if (picture.error) return { ...made, state: "failed", error: picture.error.replace(`${picture.path}: `, "") };
    const source = picture.image ? blobOf(picture.image) : field.file;
    const bitmap = await createImageBitmap(source);
    Object.assign(made, { state: "done", picture: { ...picture, image: null }, source, thumb: thumbOf(bitmap), tiles: tilesOf(bitmap, picture.cells) });
    bitmap.close();
    return made;
  }
}

const EMPTY = { state: "waiting", error: null, again: false, digest: null, picture: null, source: null, thumb: null, tiles: [] };

/** Whether the browser draws the file just as it was read. */
async function drawable(pictures, file) {
  if (pictures.every((picture) => picture.image || picture.error)) return true;
  try {
    const bitmap = await createImageBitmap(file);
    const same = bitmap.width === pictures[0].width && bitmap.height === pictures[0].height;
    bitmap.close();
    return same;
  } catch {
    return false;
  }
}
