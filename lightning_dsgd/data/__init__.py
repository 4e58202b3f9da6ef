"""What ranks train on, and who deals it.

claims     ranks claim the batches of an epoch, as many as they can train on: `data="claimed"`
units      ranks share the micro-batches of each step: `balanced`
dealing    the lane of both, which hears what is dealt, and what both ask of the ranks that train
loaders    what both need of torch's loaders
unequal    ranks have batches of different sizes, which a sampler deals; means are weighted by
           samples
"""
