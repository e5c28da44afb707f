"""A classifier of vectors trained by Lightning, with faults: ``lightning_module.py --fault item``."""

import lightning
import torch
from settings import Settings, compile_if_asked, read_settings
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Vectors(Dataset):
    def __init__(self, width, work):
        self.width, self.work = width, work

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        vector = torch.full((self.width,), 1 / (1 + index % 100))
        for _ in range(self.work):
            vector = torch.sin(vector + 0.1)  # fault: no-workers
        return vector, index % 10


class Classifier(lightning.LightningModule):
    def __init__(self, width, faults):
        super().__init__()
        self.faults = faults
        layers = [layer for _ in range(12) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())]
        self.network = nn.Sequential(*layers, nn.Linear(width, 10))
        self.total = 0.0

    def training_step(self, batch, number):
        vectors, labels = batch
        logits = self.network(vectors)
        if "item" in self.faults:
            for at in range(10):
                self.total += logits[:, at].mean().item()  # fault: item
        return F.cross_entropy(logits, labels)

    def configure_optimizers(self):
        chosen = {"foreach": False} if "for-loop" in self.faults else {"fused": self.device.type == "cuda"}
        return torch.optim.AdamW(self.parameters(), lr=1e-4, **chosen)


def train(settings: Settings, callback=None):
    """Train for as many steps as the settings say."""
    width, batch = (16, 4) if settings.tiny else (4096, 512)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    workers = 0 if "no-workers" in settings.faults else 1 if settings.tiny else 8
    loader = DataLoader(
        Vectors(width, 1),
        batch_size=batch,
        num_workers=workers,
        pin_memory=settings.device == "cuda",
        persistent_workers=workers > 0,
        prefetch_factor=4 if workers else None,
    )
    trainer = lightning.Trainer(
        accelerator="gpu" if settings.device == "cuda" else "cpu",
        devices=1,
        max_steps=settings.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback] if callback is not None else [],
    )
    model = Classifier(width, settings.faults)
    compile_if_asked(model.network, settings.faults)
    trainer.fit(model, loader)


if __name__ == "__main__":
    train(read_settings()[0])
