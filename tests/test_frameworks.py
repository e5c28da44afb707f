"""Unedited scripts of accelerate, Hugging Face's Trainer and Lightning under ``profkit run``; each skips without it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")

from profkit import read_trace
from tests.in_process import manifest_of

pytestmark = pytest.mark.frameworks


ACCELERATE = """
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = DataLoader(TensorDataset(torch.randn(48, 8), torch.randn(48, 1)), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for inputs, targets in data:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    if accelerator.is_main_process:
        print(loss.item().hex(), flush=True)
accelerator.end_training()
"""

TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=32))
rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(100, (40, 16))]
arguments = TrainingArguments(
    output_dir="out", max_steps=6, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no",
    logging_steps=1, disable_tqdm=True,
)

class Show(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            print("0x", logs["loss"], logs["grad_norm"], flush=True)

Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Show()]).train()
"""

LIGHTNING = """
import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, number):
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        print(loss.item().hex(), flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

lightning.seed_everything(0)
data = DataLoader(TensorDataset(torch.randn(32, 8), torch.randn(32, 1)), batch_size=4)
lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
).fit(Net(), data)
"""

CASES = {
    "accelerate": (ACCELERATE, ["accelerate", "launch", "--cpu", "--num_processes", "2", "train.py"]),
    "transformers": (TRAINER, [sys.executable, "train.py"]),
    "lightning": (LIGHTNING, [sys.executable, "train.py"]),
}


def _run(words: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=place, timeout=300)


def _losses(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("0x", "-0x"))]


def _profkit(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "profkit", "run", "-o", "run", "--warmup", "2", "--steps", "2", *arguments]


@pytest.mark.parametrize("package", CASES)
def test_an_unedited_script_is_recorded_and_trains_the_same(package: str, tmp_path: Path) -> None:
    script, words = CASES[package]
    if find_spec(package) is None or shutil.which(words[0]) is None:
        pytest.skip(f"{package} is not installed")
    (tmp_path / "train.py").write_text(script)
    plain, done = _run(words, tmp_path), _run(_profkit("--", *words), tmp_path)
    assert done.returncode == plain.returncode == 0, done.stderr
    assert _losses(done.stdout) == _losses(plain.stdout) != []
    opened = read_trace(tmp_path / "run")
    assert not opened.self_check.failed
    instances = {row.name: row.instances for row in opened.ranges(numbered=False).ranges}
    assert instances["step *"] == 2
    results = {phase: opened.kernels(phase) for phase in ("forward", "backward", "optimizer")}
    assert {phase: result.instances for phase, result in results.items()} == dict.fromkeys(results, 2)
    assert instances["data"] == 2, "each step gets one batch"
    (loader,) = manifest_of(tmp_path / "run")["processes"][0]["loaders"]
    made = "TrainingArguments(" if package == "transformers" else "DataLoader("
    assert script.splitlines()[loader["line"] - 1].partition(" = ")[2].startswith(made)
    # The phases are apart, also where an optimizer's step calls forward and backward (Lightning's closure).
    assert sum(result.total_ns for result in results.values()) <= opened.kernels().total_ns
    categories = {row.category for row in results["optimizer"].kernels}
    assert "gemm" not in categories


def test_accelerates_ranks_under_torchs_launcher(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(ACCELERATE)
    done = _run(_profkit("--nproc-per-node", "2", "--", sys.executable, "train.py"), tmp_path)
    assert done.returncode == 0, done.stderr
    processes = manifest_of(tmp_path / "run")["processes"]
    assert [one["rank"] for one in processes] == [0, 1]
    assert [row.instances for row in read_trace(tmp_path / "run").kernels("backward").ranks] == [2, 2]


@pytest.mark.parametrize(("package", "call"), [("transformers", ".train()"), ("lightning", ".fit(Net(), data)")])
def test_a_trainer_in_a_block_is_recorded(package: str, call: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    script, _ = CASES[package]
    before, name, _ = script.rpartition("Trainer(" if package == "transformers" else "lightning.Trainer(")
    trainer = f"{name}{script.removeprefix(before + name).removesuffix(f'{call}{chr(10)}')}"
    block = (
        f"import profkit\ntrainer = {trainer}\nwith profkit.record(steps=2, warmup=2, path='run'):\n    trainer{call}\n"
    )
    (tmp_path / "train.py").write_text(before + block)
    done = _run([sys.executable, "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    opened = read_trace(tmp_path / "run")
    assert [opened.kernels(phase).instances for phase in ("data", "forward", "backward", "optimizer")] == [2] * 4
    plain = _run([sys.executable, "-c", f"{before}trainer = {trainer}\ntrainer{call}\n"], tmp_path)
    assert _losses(done.stdout) == _losses(plain.stdout) != []
