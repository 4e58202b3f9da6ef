"""Measurements of any strategies side by side: `python -m benchmarks throughput`."""
