"""Training that goes on where ranks are lost, join or leave.

    members    the ranks of a session, in the place of `session.ranks`: they go on where one is
               lost; its head tells in order what happens then
    calls      ends calls although a rank is lost, with the same result everywhere
    changes    what begins anew where the view changes, such as the replica: `surviving`
    turnover   how ranks come and leave, before a batch
    face       what leads the training: a loop of its user's, or the Trainer: `trainer`, with the
               `shares` of the data and the `handover` of a member's state
    collectives in the place of torch's
    entrance   how a process, the newcomer, comes to ranks that train: it reads the `register` of
               their training
    suits      whether an algorithm suits all numbers of ranks that there may come to be
    membership how the ranks agree on who goes on: `ballots`, what they believe and say, and who
               may agree and go on
    views      what each rank makes of that: `survival`, between processes; `simulated`
    launch     starts ranks, looks after them, and starts lost ones again: `lightning-dsgd launch`

This folder is a wing.  The core reaches it through `lightning_dsgd.wings` alone.
"""
