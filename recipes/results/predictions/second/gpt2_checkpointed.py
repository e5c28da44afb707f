"""GPT-2 of transformers in TF32 with gradient checkpointing on."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from machine import DEVICE, run, size

BATCH, LENGTH = size(12, 2), size(512, 16)


def main(edit, steps, on_step):
    torch.set_float32_matmul_precision("high")
    config = GPT2Config(
        n_embd=size(768, 32), n_layer=size(6, 1), n_head=size(12, 2), vocab_size=8192, n_positions=LENGTH, use_cache=False
    )
    model = GPT2LMHeadModel(config).to(DEVICE)
    if "no-checkpoint" not in edit:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **({"fused": True} if "fused" in edit else {}))
    ids = torch.randint(8192, (BATCH, LENGTH), device=DEVICE)
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        on_step()


if __name__ == "__main__":
    run(main)
