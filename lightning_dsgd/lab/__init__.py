"""The laboratory: what measures, predicts and draws trainings; no training needs it.

    strategies  the table of strategies, from their `catalogue`
    doctor      what works on this machine
    jobs        ranks as processes of this machine, on emulated links
    link        what connects a rank to the others
    callbacks   what a training's communication costs; ranks delayed on demand
    stragglers  which ranks are delayed
    epochs      how simulated ranks are dealt batches
    in_force    which hyperparameters a result was measured with
    timeline    what each rank records of its time: `StepTrace` and `LoopTrace`
    diagnose    why a job is slow, from that record, here or on another cluster: `why` says it
    decisions   which strategy for which situation
    simulate    algorithms on a virtual clock, as fast as on a given machine: `diagnose` asks it
    drawing     where a run's time went: the command `timeline`
    accelerators
                what measurements ask of GPUs
    results     how they write what they have measured

It stands on the core, which reaches it through `lightning_dsgd.wings` alone.
"""
