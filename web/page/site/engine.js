// The engine's worker as one object: ask it something, get a promise.
//
// Every command goes through `ask`, which checks that the reply is of the kind that was expected, so a page and a worker
// of different versions fail in words and not as `undefined` in a chart.

/** @import { Attachment, ErrorInfo, FromWorker, Progress, Reply, Request, ToWorker } from "../protocol.d.ts" */

/**
 * A request without the number that `ask` gives it.
 * @template T
 * @typedef {T extends unknown ? Omit<T, "id"> : never} WithoutId
 */
/** @typedef {WithoutId<Request>} Command */
/**
 * @typedef {object} Asked
 * @property {(reply: Reply & { files: Attachment[] }) => void} resolve
 * @property {(error: EngineError) => void} reject
 * @property {((progress: Progress) => void) | undefined} progress
 */

/** The version of the protocol that this page speaks. */
const FORMAT = 1;

/** An error of the engine, with its stable code and its fields. */
export class EngineError extends Error {
  /** @param {ErrorInfo} info */
  constructor({ code, message, fields }) {
    super(message);
    this.code = code;
    this.fields = fields;
    /** Whether the engine has ended with it, which is told once and not by everyone who asked. */
    this.ended = false;
  }
}

/** The worker, which may be ended and begun anew: ending it frees all that it held. */
export class Engine {
  /** @type {Worker | undefined} */ #worker;
  /** @type {Map<number, Asked>} */ #asked = new Map();
  #last = 0;
  #url;
  #ready = false;
  #onEnd;

  /**
   * @param {URL} url of the worker's script
   * @param {(error: EngineError) => void} onEnd hears of a worker that ended by itself after it had been ready
   */
  constructor(url, onEnd) {
    this.#url = url;
    this.#onEnd = onEnd;
  }

  /**
   * Begins a worker, in place of the one there may be.
   * @returns {Promise<string>} the engine's version
   */
  start() {
    this.#end("restarted", "The engine was started anew.");
    const worker = new Worker(this.#url, { type: "module" });
    this.#worker = worker;
    return new Promise((resolve, reject) => {
      worker.onmessage = ({ data }) => {
        const message = /** @type {FromWorker} */ (data);
        if (message.message === "ready") {
          this.#ready = message.format === FORMAT;
          if (this.#ready) return resolve(message.version);
          reject(this.#end("format", `The page speaks protocol ${FORMAT} and the engine ${message.format}: reload the page.`));
        } else if (message.message === "failed" && message.id === 0) {
          reject(this.#end(message.error.code, message.error.message));
        } else {
          this.#answer(message);
        }
      };
      worker.onerror = (event) => {
        event.preventDefault();
        reject(this.#end("worker", `The engine stopped: ${event.message || "its script could not be loaded"}.`));
      };
    });
  }

  /**
   * Ends the worker; what was asked and not answered fails with this error.
   * @param {string} code
   * @param {string} message
   */
  #end(code, message) {
    const error = new EngineError({ code, message, fields: {} });
    error.ended = true;
    this.#worker?.terminate();
    this.#worker = undefined;
    const asked = [...this.#asked.values()];
    this.#asked.clear();
    for (const { reject } of asked) reject(error);
    if (this.#ready && code !== "restarted") this.#onEnd(error);
    this.#ready = false;
    return error;
  }

  /**
   * @template {Reply["reply"]} K
   * @param {Command} command
   * @param {K} kind of reply that it ends with
   * @param {{ files?: File[], progress?: (progress: Progress) => void }} [options]
   * @returns {Promise<Extract<Reply, { reply: K }> & { files: Attachment[] }>}
   */
  async ask(command, kind, { files, progress } = {}) {
    const worker = this.#worker;
    if (!worker) throw new EngineError({ code: "worker", message: "The engine does not run.", fields: {} });
    const id = ++this.#last;
    /** @type {Reply & { files: Attachment[] }} */
    const reply = await new Promise((resolve, reject) => {
      this.#asked.set(id, { resolve, reject, progress });
      worker.postMessage(/** @type {ToWorker} */ ({ ...command, id, ...(files && { files }) }));
    });
    if (reply.reply !== kind) {
      throw new EngineError({ code: "format", message: `The engine answered "${command.command}" with "${reply.reply}".`, fields: {} });
    }
    return /** @type {Extract<Reply, { reply: K }> & { files: Attachment[] }} */ (reply);
  }

  /** @param {Exclude<FromWorker, { message: "ready" }>} message */
  #answer(message) {
    const asked = this.#asked.get(message.id);
    if (!asked) return;
    if (message.message === "progress") {
      asked.progress?.(message.progress);
      return;
    }
    this.#asked.delete(message.id);
    if (message.message === "done") asked.resolve({ ...message.reply, files: message.files ?? [] });
    else asked.reject(new EngineError(message.error));
  }
}
