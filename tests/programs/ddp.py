"""DistributedDataParallel under torchrun, one step in two without synchronisation."""

import os

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 1)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for step in range(6):
        optimizer.zero_grad()
        with model.no_sync():
            model(torch.randn(4, 8, device=device)).square().mean().backward()
        loss = model(torch.randn(4, 8, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(step, loss.item(), flush=True)


if __name__ == "__main__":
    main()
