"""GPT-2 from scratch, trained by Hugging Face's Trainer, with faults: ``hf_trainer.py --fault eager``."""

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from settings import Settings, compile_if_asked, read_settings
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        return {"input_ids": [(index + 7 * at) % 1000 for at in range(self.length)]}


def collate(rows):
    tokens = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": tokens, "labels": tokens}


def slow_collate(rows):
    counts = [sum(token * token % 7 for token in row["input_ids"]) for row in rows * 16]  # fault: collate
    batch = collate(rows)
    batch["labels"] = batch["labels"].clamp(max=1000 + min(counts))
    return batch


class Timed(Trainer):
    """Reads the loss of each step if asked to, as some people's trainers do."""

    reads = False

    def compute_loss(self, model, inputs, *words, **options):
        loss = super().compute_loss(model, inputs, *words, **options)
        if self.reads:
            for parameter in list(model.parameters())[:40]:
                self.seen = parameter.detach().sum().item()  # fault: item
        return loss


def train(settings: Settings, callback=None):
    """Train for as many steps as the settings say."""
    faults = settings.faults
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2} if settings.tiny else {"n_embd": 768, "n_layer": 8, "n_head": 12}
    length, batch = (16, 2) if settings.tiny else (512, 8)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=8192,
        n_positions=length,
        attn_implementation="eager" if "eager" in faults else "sdpa",
        activation_function="gelu_pytorch_tanh" if "torchs-gelu" in faults else "gelu_new",
        **sizes,
    )
    model = GPT2LMHeadModel(config)
    compile_if_asked(model, faults)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=settings.steps,
            per_device_train_batch_size=batch,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            tf32=settings.device == "cuda" and "fp32" not in faults,
            optim="adamw_torch_fused" if settings.device == "cuda" else "adamw_torch",
            dataloader_num_workers=0 if settings.tiny or "collate" in faults else 4,
            use_cpu=settings.device == "cpu",
        )
        trainer = Timed(
            model=model,
            args=arguments,
            train_dataset=Texts(length),
            data_collator=slow_collate if "collate" in faults else collate,
            callbacks=[callback] if callback is not None else [],
        )
        trainer.reads = "item" in faults
        trainer.train()


if __name__ == "__main__":
    train(read_settings()[0])
