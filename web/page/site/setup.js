// Which model, which text: embedded, from files, dropped, from an address.

/** @import { DataFrom, DataInfo, KeptModel, ModelFrom, ModelInfo } from "../protocol.d.ts" */
import { alone, app, know, onChange } from "./app.js";
import { plan, setBudget } from "./budget.js";
import { byId, fillList, keptItem } from "./dom.js";
import { bytes, count, exactBytes, plural, roughly } from "./format.js";
import { forget, say, tell, tellError } from "./notices.js";
import { dataSettings, onSettings } from "./settings.js";

const copyBox = byId("copy-box", HTMLElement);
const copyWords = byId("copy-words", HTMLElement);
const copyButton = byId("copy", HTMLButtonElement);
const copyBar = byId("copy-progress", HTMLProgressElement);
const kept = byId("kept-models", HTMLElement);
const drop = byId("drop", HTMLElement);

/** Where the data came from, to read it again for another model. @type {{ from: DataFrom, files?: File[] }} */
let lastData = { from: { from: "embedded" } };

/** The default for a model that somebody brings, and for ours. */
const BUDGET = { embedded: "33%", other: "auto" };

/**
 * @param {ModelFrom} from
 * @param {File[]} [files]
 */
export async function openModel(from, files) {
  const opened = await alone("opening", "Reading the model…", async () => {
    forget();
    try {
      const { model } = await app.engine.ask({ command: "open", model: from }, "model", files ? { files } : {});
      take(model, from.from === "embedded" ? BUDGET.embedded : BUDGET.other);
      await readData();
      return true;
    } catch (error) {
      tellError(error, from.from === "embedded" ? [] : [["Back to the tiny model", () => openModel({ from: "embedded" })]]);
      return false;
    }
  });
  await plan();
  if (opened) say(`${app.model?.name} is open.`);
}

/**
 * What a new model means for what was there before.
 * @param {ModelInfo} model
 * @param {string} budget
 */
export function take(model, budget) {
  setBudget(budget);
  know({ model, data: undefined, forecast: undefined, trained: 0 });
}

async function readData() {
  const { from, files } = lastData;
  const { data } = await app.engine.ask({ command: "data", data: from, options: dataSettings() }, "data", files ? { files } : {});
  know({ data });
}

/**
 * @param {DataFrom} from
 * @param {File[]} [files]
 */
async function openData(from, files) {
  const before = lastData;
  lastData = files ? { from, files } : { from };
  await alone("opening", "Reading the text…", async () => {
    forget();
    try {
      await readData();
      say(`${app.data?.name} is read.`);
    } catch (error) {
      lastData = before;
      tellError(error);
    }
  });
  await plan();
}

/** Files that somebody chose or dropped: what they are shows in their names. @param {File[]} files */
export function openFiles(files) {
  const isModel = (/** @type {File} */ file) => /\.safetensors(\.index\.json)?$|(^|\/)config\.json$/i.test(file.name);
  const isData = (/** @type {File} */ file) => /\.(jsonl|txt|md|text)$/i.test(file.name);
  if (files.some(isModel)) return openModel({ from: "files" }, files);
  const data = files.filter(isData);
  if (data.length > 0) return openData({ from: "files" }, data);
  tell({
    title: "Nothing to open here",
    text: `A model needs its config.json and .safetensors files, a text is a .jsonl or .txt file; there ${files.length === 1 ? "is" : "are"} ${files.length === 0 ? "no files" : plural(files.length, "other file")}.`,
  });
  return undefined;
}

async function copyModel() {
  await alone("opening", "Copying the model into this browser…", async () => {
    forget();
    copyBar.hidden = false;
    try {
      const { model } = await app.engine.ask({ command: "copy" }, "model", {
        progress: (progress) => {
          if (progress.progress !== "copied") return;
          copyBar.value = progress.of === 0 ? 1 : progress.bytes / progress.of;
          know({ phase: `Copying ${progress.file}: ${bytes(progress.bytes)} of ${bytes(progress.of)}` });
        },
      });
      know({ model });
      await listKept();
      if (!app.data) await readData();
      say("The model is copied.");
    } catch (error) {
      tellError(error);
    }
    copyBar.hidden = true;
  });
  await plan();
}

/** Shows the models that were copied before. */
export async function listKept() {
  try {
    showKept((await app.engine.ask({ command: "kept-models" }, "kept-models")).models);
  } catch (error) {
    tellError(error);
  }
}

/** @param {KeptModel[]} models */
function showKept(models) {
  kept.replaceChildren(
    ...models.map(({ name, bytes: size }) =>
      keptItem("model", name, `${bytes(size)} in this browser`, [
        ["Open", () => openModel({ from: "kept", name })],
        ["Delete", () => alone("opening", "Deleting…", async () => {
          try {
            showKept((await app.engine.ask({ command: "delete-model", name }, "kept-models")).models);
          } catch (error) {
            tellError(error);
          }
        })],
      ]),
    ),
  );
}

/** @param {string} id @param {() => void} act */
const onClick = (id, act) => byId(id, HTMLElement).addEventListener("click", act);
onClick("model-embedded", () => openModel({ from: "embedded" }));
onClick("data-embedded", () => openData({ from: "embedded" }));
copyButton.addEventListener("click", copyModel);

for (const id of ["model-folder", "model-files", "data-files"]) {
  const input = byId(id, HTMLInputElement);
  input.addEventListener("change", () => {
    const files = [...(input.files ?? [])];
    input.value = "";
    if (files.length === 0) return;
    if (id === "data-files") openData({ from: "files" }, files);
    else openModel({ from: "files" }, files);
  });
}
byId("model-url-form", HTMLFormElement).addEventListener("submit", (event) => {
  event.preventDefault();
  openModel({ from: "url", url: byId("model-url", HTMLInputElement).value });
});
byId("data-text-form", HTMLFormElement).addEventListener("submit", (event) => {
  event.preventDefault();
  openData({ from: "text", text: byId("data-text", HTMLTextAreaElement).value });
});
onSettings(async (data) => {
  if (data) await openData(lastData.from, lastData.files);
  else await plan();
});

// A page that a file is dropped on by mistake must not navigate away to it.
addEventListener("dragover", (event) => {
  event.preventDefault();
  drop.classList.toggle("over", event.dataTransfer?.types.includes("Files") === true && app.doing === "idle");
});
addEventListener("dragleave", (event) => {
  if (event.relatedTarget === null) drop.classList.remove("over");
});
addEventListener("drop", async (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  if (!event.dataTransfer || app.doing !== "idle") return;
  // Entries and files must be taken before the first wait: afterwards the list is empty.
  const items = [...event.dataTransfer.items].filter((item) => item.kind === "file");
  const entries = items.map((item) => item.webkitGetAsEntry());
  const loose = items.map((item) => item.getAsFile()).filter((file) => file !== null);
  const folders = entries.filter((entry) => entry?.isDirectory);
  try {
    const inside = await Promise.all(folders.map((entry) => filesOf(/** @type {FileSystemDirectoryEntry} */ (entry))));
    openFiles([...loose.filter((_, index) => entries[index]?.isDirectory !== true), ...inside.flat()]);
  } catch (error) {
    tellError(error);
  }
});

/**
 * The files of a folder, those of its folders left out: a model lies in one.
 * @param {FileSystemDirectoryEntry} folder
 * @returns {Promise<File[]>}
 */
async function filesOf(folder) {
  const reader = folder.createReader();
  /** @type {File[]} */
  const found = [];
  for (;;) {
    // A reader gives a hundred entries at a time, and an empty list at the end.
    const entries = await new Promise((/** @type {(entries: FileSystemEntry[]) => void} */ resolve, reject) => reader.readEntries(resolve, reject));
    if (entries.length === 0) return found;
    for (const entry of entries) {
      if (!entry.isFile) continue;
      found.push(await new Promise((resolve, reject) => /** @type {FileSystemFileEntry} */ (entry).file(resolve, reject)));
    }
  }
}

const modelName = byId("model-name", HTMLElement);
const modelFacts = byId("model-facts", HTMLElement);
const dataName = byId("data-name", HTMLElement);
const dataFacts = byId("data-facts", HTMLElement);

onChange(() => {
  const { model, data, doing } = app;
  for (const box of ["model-box", "data-box"]) {
    for (const control of byId(box, HTMLElement).querySelectorAll("button, input, textarea")) {
      /** @type {HTMLButtonElement} */ (control).disabled = doing !== "idle";
    }
  }
  modelName.textContent = model ? `${model.name}, ${bytes(model.weight_bytes)}` : "opening…";
  fillList(modelFacts, model ? modelRows(model) : []);
  dataName.textContent = data ? `${data.name}, ${plural(data.rows, "row")}` : "opening…";
  fillList(dataFacts, data ? dataRows(data) : []);
  copyBox.hidden = !model || model.trainable;
  if (model && !model.trainable) {
    const free = model.free_bytes === null ? "" : `; the browser has room for ${bytes(model.free_bytes)}`;
    copyWords.textContent = `To be trained, a model at an address is copied into this browser first: ${bytes(model.file_bytes)}${free}.`;
  }
});

/** @param {ModelInfo} model @returns {[string, string, string?][]} */
const modelRows = (model) => [
  ["Architecture", model.architecture],
  ["Parameters", roughly(model.parameters), count(model.parameters)],
  ["Weights", bytes(model.weight_bytes), exactBytes(model.weight_bytes)],
  ["Shape", `${plural(model.blocks, "block")}, ${count(model.hidden)} wide, ${count(model.vocabulary)} tokens known`],
  ["Layers to adapt", model.linear_layers.join(", ")],
  ...model.notes.map((note) => /** @type {[string, string]} */ (["Note", note])),
];

/** @param {DataInfo} data @returns {[string, string, string?][]} */
const dataRows = (data) => [
  ["Rows", `${count(data.rows)}${data.validation_rows > 0 ? ` and ${count(data.validation_rows)} to validate on` : ""}`],
  ["Tokens", `${count(data.tokens)}, the longest row ${count(data.longest)}`],
  ...data.notes.map((note) => /** @type {[string, string]} */ (["Note", note])),
];
