"""Replicas of a model that several ranks hold together, in shards: FSDP2 and tensor parallelism.

    mesh_sharding    which ranks hold the same shard: the core's `session.sharding.Sharding`
    shards           how a replica is laid out over its ranks
    together         what the ranks of a replica do together: they ask each other, fail, and save
    strategy         the face for Lightning's Trainer, `ShardedStrategy`

This folder is a wing.  The core reaches it through `lightning_dsgd.wings` alone.
"""
