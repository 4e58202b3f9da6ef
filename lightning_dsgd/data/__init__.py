"""What ranks train on, and who deals it.

claims     ranks claim the batches of an epoch, as many as they can train on: `data="claimed"`
units      ranks share the micro-batches of each step: `balanced`
dealing    the lane of both, which hears what is dealt
loaders    what both need of torch's loaders
ranks      what both ask of the ranks that train
unequal    ranks have batches of different sizes, and means are weighted by samples;
           `unequal_sampler` deals the data so
"""
