// A model so small that hundreds of its steps take seconds on a GPU in software: a Llama of random weights, with the
// tokenizer of the page's own model. Made here and not stored; it is also what a visitor's own files look like.

import { readFileSync } from "node:fs";

const assets = new URL("../../../native/assets/tiny-shakespeare-llama/", import.meta.url);
const HIDDEN = 32;
const INNER = 64;
const LAYERS = 2;
const VOCABULARY = 1024;

const CONFIG = {
  architectures: ["LlamaForCausalLM"], model_type: "llama", hidden_act: "silu", hidden_size: HIDDEN, intermediate_size: INNER,
  num_hidden_layers: LAYERS, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, max_position_embeddings: 128,
  rms_norm_eps: 1e-5, rope_theta: 10000, vocab_size: VOCABULARY, tie_word_embeddings: true, bos_token_id: 0, eos_token_id: 0, dtype: "float32",
};

/** The files as Playwright's `setInputFiles` takes them. */
export function smallModel() {
  const file = (/** @type {string} */ name, /** @type {Buffer} */ buffer) => ({ name, mimeType: "application/octet-stream", buffer });
  const tokenizer = ["tokenizer.json", "tokenizer_config.json"].map((name) => file(name, readFileSync(new URL(name, assets))));
  return [file("config.json", Buffer.from(JSON.stringify(CONFIG))), file("model.safetensors", weights()), ...tokenizer];
}

function weights() {
  /** @type {[string, number[]][]} */
  const tensors = [["model.embed_tokens.weight", [VOCABULARY, HIDDEN]], ["model.norm.weight", [HIDDEN]]];
  for (let layer = 0; layer < LAYERS; layer++) {
    const name = (/** @type {string} */ rest) => `model.layers.${layer}.${rest}.weight`;
    tensors.push(
      [name("input_layernorm"), [HIDDEN]], [name("post_attention_layernorm"), [HIDDEN]],
      [name("self_attn.q_proj"), [32, HIDDEN]], [name("self_attn.k_proj"), [16, HIDDEN]], [name("self_attn.v_proj"), [16, HIDDEN]], [name("self_attn.o_proj"), [HIDDEN, 32]],
      [name("mlp.gate_proj"), [INNER, HIDDEN]], [name("mlp.up_proj"), [INNER, HIDDEN]], [name("mlp.down_proj"), [HIDDEN, INNER]],
    );
  }
  /** @type {Record<string, unknown>} */
  const header = {};
  const parts = [];
  let at = 0;
  let state = 1;
  for (const [name, shape] of tensors) {
    const values = new Float32Array(shape.reduce((size, n) => size * n, 1));
    for (const i of values.keys()) {
      state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
      values[i] = shape.length === 1 ? 1 : (state / 2 ** 31 - 1) * 0.3;
    }
    header[name] = { dtype: "F32", shape, data_offsets: [at, at + values.byteLength] };
    at += values.byteLength;
    parts.push(Buffer.from(values.buffer));
  }
  let text = JSON.stringify(header);
  text = text.padEnd(Math.ceil(text.length / 8) * 8);
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length));
  return Buffer.concat([length, Buffer.from(text), ...parts]);
}
