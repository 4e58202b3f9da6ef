"""The micro-batches of a step, and who computes which: `balanced`."""
