"""What every face shares, whoever drives it: the Trainer, Fabric, or a loop in plain PyTorch."""
