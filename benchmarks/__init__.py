"""The research tree: what measures the package, run from a clone of the repository."""
