"""Training that goes on where ranks are lost, join or leave.

    launch    starts ranks, looks after them, and starts lost ones again: `lightning-dsgd launch`

This folder is a wing.  The core reaches it through `lightning_dsgd.wings` alone.
"""
