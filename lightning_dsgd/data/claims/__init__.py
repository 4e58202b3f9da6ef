"""Batches that ranks claim from the epoch: `data="claimed"`."""
