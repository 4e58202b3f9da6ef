"""The face for a training loop in plain PyTorch."""
