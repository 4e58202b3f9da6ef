"""What ranks train on: the micro-batches of a step, and who computes which."""
