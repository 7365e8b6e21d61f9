#!/usr/bin/env python3
"""What PyTorch, transformers and PEFT make of our folders. Run by tests/tests/peft.rs.

usage: peft_reference.py logits MODEL ADAPTER|- IDS OUT          logits of a batch, the adapter opened by stock PEFT
       peft_reference.py make   MODEL ADAPTER TARGETS IDS OUT    makes an adapter with numbers in it; its logits
       peft_reference.py train  MODEL ADAPTER IDS OUT            ten steps from an adapter's values; losses

IDS and OUT are safetensors files: `ids` [n, tokens] or, for train, `batches` and `eval`.
"""

import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def base(folder):
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def logits(model, file, out):
    with torch.no_grad():
        save_file({"logits": model(load_file(file)["ids"].long()).logits.contiguous()}, out)


def train(model, file, out):
    data = load_file(file)
    batches, evaluation = data["batches"].long(), data["eval"].long()
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)

    def loss(ids):
        return model(ids, labels=ids).loss

    losses = []
    for step in range(10):
        row = batches[step % len(batches)][None]
        adamw.zero_grad()
        value = loss(row)
        value.backward()
        adamw.step()
        losses.append(value.detach())
    with torch.no_grad():
        save_file({"losses": torch.stack(losses), "eval_loss": loss(evaluation)[None]}, out)


def main(command, folder, adapter, *rest):
    model = base(folder)
    if command == "make":
        targets, file, out = rest
        config = LoraConfig(r=4, lora_alpha=8, target_modules=targets.split(","), task_type="CAUSAL_LM")
        model = get_peft_model(model, config).eval()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_" in name:
                    p.normal_(0.0, 0.1)
        model.save_pretrained(adapter)
        logits(model, file, out)
    elif command == "train":
        train(PeftModel.from_pretrained(model, adapter, is_trainable=True).eval(), *rest)
    else:
        logits(model if adapter == "-" else PeftModel.from_pretrained(model, adapter).eval(), *rest)


if __name__ == "__main__":
    main(*sys.argv[1:])
