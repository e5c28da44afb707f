"""A GAN: the discriminator's update on a real and a fake batch, then the generator's, each with its optimizer."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(4, 16), nn.ReLU(True), nn.Linear(16, 8))

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2, inplace=True), nn.Linear(16, 1))

    def forward(self, x):
        return self.main(x).squeeze(1)


netG, netD = Generator().to(device), Discriminator().to(device)
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.SGD(netG.parameters(), lr=2e-4)
ones, zeros = torch.ones(16, device=device), torch.zeros(16, device=device)

for step in range(6):
    netD.zero_grad()
    real = torch.randn(16, 8, device=device) + 2
    loss_real = criterion(netD(real), ones)
    loss_real.backward()
    fake = netG(torch.randn(16, 4, device=device))
    loss_fake = criterion(netD(fake.detach()), zeros)
    loss_fake.backward()
    optimizerD.step()

    netG.zero_grad()
    loss_g = criterion(netD(fake), ones)
    loss_g.backward()
    optimizerG.step()
    print(step, loss_real.item() + loss_fake.item(), loss_g.item())
