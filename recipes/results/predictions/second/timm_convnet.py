"""A convolutional network of timm under autocast, with SGD in a loop over its parameters."""

import timm
import torch
import torch.nn.functional as F

from machine import DEVICE, run, size

BATCH, SIDE = size(48, 2), size(160, 64)


def main(edit, steps, on_step):
    model = timm.create_model("resnet50", num_classes=100).to(DEVICE)
    how = {"memory_format": torch.channels_last} if "channels-last" in edit else {}
    model = model.to(**how) if how else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach="foreach" in edit)
    images = torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE)
    labels = torch.randint(100, (BATCH,), device=DEVICE)
    for _ in range(steps):
        batch = images.clone()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = F.cross_entropy(model(batch.contiguous(**how) if how else batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        on_step()


if __name__ == "__main__":
    run(main)
