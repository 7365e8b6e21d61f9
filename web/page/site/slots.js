// What lies in the weight slots. A part that was given up stays where it is until another is loaded into its place, and
// that is what a picture of memory has to show: between the engine's `evict` and the next `load` nothing has moved.

/** @import { Timed } from "../protocol.d.ts" */

/** @typedef {{ at: number, name: string, pass: string, here: boolean }} Change */

export class Slots {
  /** Bytes of all weight slots. */ #room;
  /** @type {Map<string, number>} */ #here = new Map();
  /** Given up, the first first. @type {string[]} */ #leaving = [];

  /** @param {number} room bytes of all weight slots */
  constructor(room) {
    this.#room = room;
  }

  /** Bytes of the parts that are here. */
  get bytes() {
    let sum = 0;
    for (const size of this.#here.values()) sum += size;
    return sum;
  }

  /** The parts that are here. */
  get names() {
    return [...this.#here.keys()];
  }

  /**
   * What one event changes, in order.
   * @param {Timed} timed
   * @returns {Change[]}
   */
  change(timed) {
    if (timed.event === "evict") this.#leaving.push(timed.segment);
    if (timed.event !== "load") return [];
    const { at, segment, pass, bytes } = timed;
    /** @type {Change[]} */
    const changes = [];
    const again = this.#leaving.indexOf(segment);
    if (again >= 0) this.#leaving.splice(again, 1);
    while (this.#leaving.length > 0 && this.bytes + bytes > this.#room) {
      const name = this.#leaving.shift() ?? "";
      if (this.#here.delete(name)) changes.push({ at, name, pass, here: false });
    }
    if (this.#here.delete(segment)) changes.push({ at, name: segment, pass, here: false });
    this.#here.set(segment, bytes);
    changes.push({ at, name: segment, pass, here: true });
    return changes;
  }
}
