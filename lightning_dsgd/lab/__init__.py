"""The laboratory: what measures, predicts and draws trainings; no training needs it.

    strategies  the table of strategies, from their `catalogue`
    doctor      what works on this machine
    probe       what messages and sums cost on this cluster
    simulate    how fast a strategy would be, on many ranks
    advise      which strategy is fastest, from what `probe` and `StepTrace` recorded
    bench       strategies side by side, measured
    callbacks   what a training's communication costs; ranks delayed on demand
    stragglers  which ranks are delayed
    epochs      how simulated ranks are dealt batches
    in_force    which hyperparameters a result was measured with
    timeline    what each rank records of its time: `StepTrace` and `LoopTrace`
    diagnose    why a DDP job is slow, from that record
    drawing     where a run's time went: the command `timeline`
    accelerators
                what measurements ask of GPUs
    results     how they write what they have measured

It stands on the core, which reaches it through `lightning_dsgd.wings` alone.
"""
