"""LoRA: only the small adapters of a Hugging Face model are trained and sent.

    pip install '.[examples]'
    python examples/lora.py [--strategy ddp]

A small Llama with random weights, so that nothing is downloaded, learns to count.  What is frozen
is broadcast once, when training begins; from then on the adapters alone are sent.
"""

import argparse

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_dsgd  # noqa: F401  registers the names

try:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as err:
    raise SystemExit(f"{err}: this example needs pip install '.[examples]'") from err

WORDS = 16


class Counting(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=WORDS, num_hidden_layers=2, initializer_range=0.2, **size)
        adapters = LoraConfig(r=8, target_modules="all-linear")
        self.network = get_peft_model(LlamaForCausalLM(config), adapters)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss = self.network(input_ids=tokens, labels=tokens).loss
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--strategy", default="hpsgd")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    L.seed_everything(0)
    model = Counting()
    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
    )
    tokens = (torch.randint(WORDS, (1024, 1)) + torch.arange(12)) % WORDS
    trainer.fit(model, DataLoader(tokens, batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        trained, all_of_them = model.network.get_nb_trainable_parameters()
        loss = float(trainer.callback_metrics["loss"])
        print(f"{args.strategy}: loss {loss:.3f}, by {trained} of {all_of_them} parameters")
