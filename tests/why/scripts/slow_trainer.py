"""Hugging Face's Trainer, whose rank 1 has a slow loader."""

import time

import torch
import torch.distributed as dist
import transformers


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 80

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        time.sleep(0.05 * (dist.get_rank() == 1))
        return {"x": torch.ones(10), "labels": torch.ones(1)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(10, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


args = transformers.TrainingArguments(
    "out",
    use_cpu=True,
    num_train_epochs=1,
    per_device_train_batch_size=1,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    remove_unused_columns=False,
)
transformers.Trainer(Model(), args, train_dataset=Rows()).train()
