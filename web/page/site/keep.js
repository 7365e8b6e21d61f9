// What is kept: the adapter as a download, and sessions in the browser's own file system.

/** @import { SessionInfo } from "../protocol.d.ts" */
import { alone, app, know, onChange } from "./app.js";
import { plan } from "./budget.js";
import { byId, element, keptItem } from "./dom.js";
import { bytes, count } from "./format.js";
import * as loss from "./loss.js";
import { forget, say, tellError } from "./notices.js";
import { clear } from "./samples.js";
import { showSettings } from "./settings.js";
import { take } from "./setup.js";
import { downloadZip } from "./vendor/client-zip.js";

const download = byId("download", HTMLButtonElement);
const form = byId("session-form", HTMLFormElement);
const save = byId("save", HTMLButtonElement);
const name = byId("session-name", HTMLInputElement);
const list = byId("sessions", HTMLElement);

download.addEventListener("click", () =>
  alone("opening", "Packing the adapter…", async () => {
    try {
      const { files, steps } = await app.engine.ask({ command: "export-adapter" }, "adapter");
      const parts = files.map(({ name, bytes }) => ({ name, input: bytes, lastModified: new Date() }));
      give(await downloadZip(parts).blob(), `ebbtide-adapter-${steps}-steps.zip`);
      know({ phase: "The adapter is in your downloads." });
    } catch (error) {
      tellError(error);
    }
  }),
);

/** @param {Blob} blob @param {string} name */
function give(blob, name) {
  const link = element("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  // The browser has its own hold of the blob once the download began.
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  await sessions("Saving the session…", async () => {
    const reply = await app.engine.ask({ command: "save-session", name: name.value.trim() }, "sessions");
    say("The session is saved.");
    know({ phase: "The session is saved in this browser." });
    return reply.sessions;
  });
});

/** Shows the sessions there are. */
export async function listSessions() {
  try {
    show((await app.engine.ask({ command: "sessions" }, "sessions")).sessions);
  } catch (error) {
    tellError(error);
  }
}

/** @param {string} phase @param {() => Promise<SessionInfo[]>} what */
const sessions = (phase, what) =>
  alone("opening", phase, async () => {
    try {
      show(await what());
    } catch (error) {
      tellError(error);
    }
  });

/** @param {SessionInfo} session */
async function open(session) {
  await alone("opening", "Opening the session…", async () => {
    forget();
    try {
      const found = await app.engine.ask({ command: "open-session", name: session.name }, "session");
      take(found.model, found.run.budget ?? "auto");
      showSettings(found.run);
      loss.begin(found.losses);
      clear(["before", "after"]);
      name.value = found.session.name;
      know({ data: found.data, trained: found.session.steps, phase: `${count(found.session.steps)} steps done; go on when you like.` });
      say("The session is open.");
    } catch (error) {
      tellError(error);
    }
  });
  await plan();
}

/** @param {SessionInfo[]} found */
function show(found) {
  list.replaceChildren(
    ...found.map((session) => {
      const when = new Date(session.saved_at).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
      return keptItem("session", session.name, `${session.model}, ${count(session.steps)} steps, ${bytes(session.bytes)}, ${when}`, [
        ["Open", () => open(session)],
        ["Delete", () => sessions("Deleting…", async () => (await app.engine.ask({ command: "delete-session", name: session.name }, "sessions")).sessions)],
      ]);
    }),
  );
}

onChange(() => {
  const idle = app.doing === "idle";
  download.disabled = save.disabled = !idle || app.trained === 0;
  for (const button of list.querySelectorAll("button")) button.disabled = !idle;
});
