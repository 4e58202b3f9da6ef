"""One paper a file; the hyperparameters are the fields of its dataclass."""
