"""The parts of `benchmarks/gpu.py`, and how a part is run.

apart       a process group of its own for each part, and its end
place       the device, the sizes, and what time something takes
alone       what one process measures: ceilings, copies, passes over memory, selection, graphs
gpt         steps of GPT-2 on one rank, by every face
together    ranks that share the device: what strategies add, who waits, what memory they need
tested      tests, and the ways to start a script
"""
