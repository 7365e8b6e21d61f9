// A worker that speaks the protocol and computes nothing: for tests of the page alone, on machines and in states that
// the real engine does not reach at will. Tests serve it in place of `worker.js`; the page cannot tell.

const MIB = 1 << 20;
const SEGMENTS = [...Array.from({ length: 6 }, (_, i) => [`block.${i}`, 835_584]), ["head", 393_600]];
const WEIGHTS = SEGMENTS.reduce((sum, [, size]) => sum + size, 0);
const began = performance.now();
const at = () => performance.now() - began;
let run;
let trained = 0;
let budget = 2 * MIB;
let sessions = [];
let kept = [];
const done = (id, reply, files) => postMessage({ message: "done", id, reply, ...(files && { files }) });
const failed = (id, code, message, fields = {}) => postMessage({ message: "failed", id, error: { code, message, fields } });
const say = (id, progress) => postMessage({ message: "progress", id, progress });
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

const model = (name = "tiny-shakespeare-llama", trainable = true) => ({
  name, architecture: "LlamaForCausalLM", parameters: 2_558_400, weight_bytes: WEIGHTS, file_bytes: WEIGHTS + 60_000, blocks: 6, hidden: 192,
  vocabulary: 1024, max_positions: 512, linear_layers: ["q_proj", "k_proj", "v_proj", "o_proj"], trainable, free_bytes: 1e9, notes: [],
});
const data = (name = "the tide log", rows = 480) => ({
  name, rows, validation_rows: 48, tokens: rows * 40, longest: 62, trained_tokens: rows * 39, notes: [],
});

function forecast(wanted = "auto") {
  const fixed = 1.6 * MIB;
  const all = fixed + WEIGHTS;
  const floor = fixed + 835_584;
  const percent = /^([\d.]+)%$/.exec(wanted);
  const bytes = wanted === "floor" ? floor : wanted === "all" || wanted === "auto" ? all : percent ? Math.max(floor, fixed + (WEIGHTS * percent[1]) / 100) : Number(wanted);
  if (!(bytes >= floor)) return undefined;
  const slots = Math.min(WEIGHTS, bytes - fixed);
  const resident = slots === WEIGHTS ? WEIGHTS : slots - 835_584;
  const home = SEGMENTS.filter(((left) => ([, size]) => (size <= left ? ((left -= size), true) : false))(resident));
  const loads = 2 * (SEGMENTS.length - home.length) - (home.length < SEGMENTS.length ? 1 : 0);
  return {
    home,
    forecast: {
      budget: wanted, budget_bytes: Math.round(bytes), floor_bytes: floor, floor_set_by: "block.0", all_bytes: all, peak_bytes: Math.round(fixed + slots),
      peak_by_category: { weights: slots, activations: 0.9 * MIB, workspace: 0.1 * MIB, adapters: 0.1 * MIB, gradients: 0.1 * MIB, optimizer: 0.2 * MIB, upload: 0.15 * MIB, readback: 4096, uniforms: 8192 },
      weight_bytes: WEIGHTS, resident_weights: resident, loads_per_step: loads, bytes_per_step: loads * 835_584, micro_batches_at_once: 1, recomputes: true,
      segments: SEGMENTS, trainable: 49_152,
    },
  };
}

async function train(id, settings) {
  const plan = forecast(settings.budget);
  const { home, forecast: f } = plan;
  const here = new Map(home);
  const held = () => [...here.values()].reduce((sum, size) => sum + size, 0);
  budget = f.peak_bytes;
  run = { paused: false, stopped: false };
  say(id, { progress: "forecast", forecast: f });
  say(id, { progress: "phase", phase: "compiling kernels" });
  await sleep(60);
  const prompt = settings.sample?.prompt ?? "";
  const last = (settings.resume ? trained : 0) + (settings.steps ?? 60);
  if (!settings.resume) say(id, { progress: "sample", step: 0, prompt, text: "\n\nROMEO.\nI am not so, <b>my lord</b>,\nAnd so I am not so." });
  let step = settings.resume ? trained : 0;
  while (step < last && !run.stopped) {
    if (run.paused) say(id, { progress: "paused", paused: true });
    while (run.paused && !run.stopped) await sleep(10);
    const events = [];
    const event = (e) => events.push({ at: at(), allocated: f.peak_bytes, weights_held: held(), ...e });
    const start = at();
    event({ event: "run-start", program: "train 4x64" });
    let loads = 0;
    for (const pass of ["forward", "backward"]) {
      for (const [name, size] of pass === "forward" ? SEGMENTS : SEGMENTS.toReversed()) {
        await sleep(6);
        if (here.has(name)) continue;
        const gone = [...here.keys()].find((other) => !home.some(([kept]) => kept === other));
        if (gone) {
          here.delete(gone);
          event({ event: "evict", segment: gone, pass });
        }
        here.set(name, size);
        loads += 1;
        event({ event: "load", segment: name, pass, bytes: size });
      }
    }
    await sleep(6);
    event({ event: "run-end", program: "train 4x64", loads, evictions: loads, streamed_bytes: loads * 835_584 });
    step += 1;
    const ms = at() - start;
    say(id, { progress: "events", events });
    say(id, { progress: "step", step: { step, loss: 2.1 + 2.9 * Math.exp(-step / 18) + 0.12 * Math.sin(step * 1.7), learning_rate: 2e-3, grad_norm: 1, finite: true, trained_tokens: 160, tokens_per_second: 160_000 / ms, milliseconds: ms, loads, streamed_bytes: loads * 835_584, peak_bytes: f.peak_bytes } });
    if (step % 20 === 0) say(id, { progress: "validation", step, loss: 2.3 + 2.9 * Math.exp(-step / 18) });
  }
  trained = step;
  say(id, { progress: "sample", step, prompt, text: " Low water 04:25, 1.0 m. Porpoises off the bar. All moorings checked." });
  done(id, { reply: "trained", steps: step, stopped: run.stopped, loss: 2.15, validation_loss: 2.3, peak_bytes: f.peak_bytes, planned_peak_bytes: f.peak_bytes, peak_by_category: f.peak_by_category });
  run = undefined;
}

const figures = (small) => ({
  budget_bytes: small ? 74_000 : 148_000, floor_bytes: 73_728, peak_bytes: small ? 73_728 : 147_456, planned_peak_bytes: small ? 73_728 : 147_456,
  peak_by_category: { weights: small ? 18_432 : 36_864 }, loads: small ? 39 : 2, evictions: small ? 38 : 0, streamed_bytes: 39 * 18_432, milliseconds: 12,
});

const COMMANDS = {
  "open-device": ({ id }) => done(id, { reply: "device", rows: [["adapter", "A GPU that is none"], ["largest buffer", "1 GiB"]] }),
  open: ({ id, model: from, files }) => {
    if (from.from === "url") return done(id, { reply: "model", model: model("far-away", false) });
    if (files?.some((file) => file.name.startsWith("broken"))) return failed(id, "format", `broken.safetensors: <img src=x onerror=alert(1)> is no header`);
    return done(id, { reply: "model", model: model(files?.[0]?.name) });
  },
  copy: async ({ id }) => {
    for (let i = 0; i <= 4; i++) {
      say(id, { progress: "copied", file: "model.safetensors", bytes: (i * WEIGHTS) / 4, of: WEIGHTS });
      await sleep(20);
    }
    kept = [{ name: "far-away", bytes: WEIGHTS }];
    done(id, { reply: "model", model: model("far-away") });
  },
  "kept-models": ({ id }) => done(id, { reply: "kept-models", models: kept }),
  "delete-model": ({ id, name }) => {
    kept = kept.filter((model) => model.name !== name);
    done(id, { reply: "kept-models", models: kept });
  },
  data: ({ id, data: from }) => done(id, { reply: "data", data: from.from === "text" ? data("your text", from.text.split("\n\n").length) : data() }),
  plan: async ({ id, run }) => {
    await sleep(15);
    const plan = forecast(run.budget);
    if (plan) return done(id, { reply: "forecast", forecast: plan.forecast });
    return failed(id, "budget-below-floor", `The budget ${run.budget} is below the floor of 2.4 MiB, set by block.0.`);
  },
  train: ({ id, run }) => train(id, run),
  pause: ({ id }) => { if (run) run.paused = true; done(id, { reply: "ok" }); },
  resume: ({ id }) => { if (run) run.paused = false; done(id, { reply: "ok" }); },
  stop: ({ id }) => { if (run) run.stopped = true; done(id, { reply: "ok" }); },
  "lose-device": ({ id }) => done(id, { reply: "ok" }),
  memory: ({ id }) => done(id, { reply: "memory", allocated: forecast("33%").forecast.peak_by_category, peak_bytes: budget, buffers: 60, buffers_made: 60, wasm_bytes: 10 * MIB, in_flight_bytes: 0, in_flight_peak_bytes: MIB }),
  sample: async ({ id, sample }) => {
    const text = sample.without_adapter ? "\n\nROMEO.\nI am not so." : " High water 09:55, 4.4 m.";
    for (const piece of text.split(/(?= )/)) {
      say(id, { progress: "text", text: piece });
      await sleep(20);
    }
    done(id, { reply: "sampled", text, tokens: 12, tokens_per_second: 50 });
  },
  sessions: ({ id }) => done(id, { reply: "sessions", sessions }),
  "save-session": ({ id, name }) => {
    sessions = [{ name, model: "tiny-shakespeare-llama", steps: trained, bytes: 590_000, saved_at: Date.now() }, ...sessions.filter((s) => s.name !== name)];
    done(id, { reply: "sessions", sessions });
  },
  "delete-session": ({ id, name }) => {
    sessions = sessions.filter((s) => s.name !== name);
    done(id, { reply: "sessions", sessions });
  },
  "open-session": ({ id, name }) => {
    trained = sessions.find((s) => s.name === name).steps;
    done(id, { reply: "session", session: sessions.find((s) => s.name === name), model: model(), data: data(), run: { budget: "50%", steps: 30 }, losses: Array.from({ length: trained }, (_, i) => [i + 1, 3]) });
  },
  "export-adapter": ({ id }) => done(id, { reply: "adapter", steps: trained }, [
    { name: "adapter_config.json", bytes: new TextEncoder().encode('{"peft_type":"LORA"}') },
    { name: "adapter_model.safetensors", bytes: new Uint8Array(64) },
  ]),
  probe: async ({ id, probe }) => {
    await sleep(30);
    const small = probe.budget !== "all";
    if (probe.program === "stream") {
      const events = [{ at: 0, event: "run-start", program: "probe" }];
      for (let i = 0; small && i < 39; i++) {
        if (i > 0) events.push({ at: i * 10 - 1, event: "evict", segment: (i < 20 ? i - 1 : i - 2) % 2 ? "up" : "down", pass: i <= 20 ? "forward" : "backward" });
        events.push({ at: i * 10, event: "load", segment: (i < 20 ? i : i - 1) % 2 ? "up" : "down", pass: i < 20 ? "forward" : "backward", bytes: 18_432 });
      }
      events.push({ at: 400, event: "run-end", program: "probe" });
      say(id, { progress: "events", events: events.map((event) => ({ allocated: 73_728, weights_held: 18_432, ...event })) });
      const trace = Array.from({ length: small ? 39 : 2 }, (_, i) => `load    ${i % 2 ? "up" : "down"}  ${i < 20 ? "forward" : "backward"}  18,432 bytes`);
      return done(id, { reply: "stream-probe", trace, loss: 0.0123, grad_sha256: "ab12cd34ef567890".repeat(4), figures: figures(small) });
    }
    return done(id, { reply: "fold-probe", trace: ["load w.0", "fold w.0 transposed", "free w.0"], folded: probe.fold ? 8 : 0, freed: probe.fold ? 8 : 0, held_bytes: 8 * 262_144, compile_peak_bytes: 9 * 262_144, weight_bytes: 8 * 262_144, sha256: "00ff".repeat(16), figures: figures(true) });
  },
};

addEventListener("message", ({ data: request }) => COMMANDS[request.command](request));
postMessage({ message: "ready", format: 1, version: "0.0.0-fake" });
