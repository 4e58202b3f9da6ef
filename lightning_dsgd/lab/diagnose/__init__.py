"""Why a job in DDP or FSDP is slow, and which rank is late: a part of `lightning-dsgd why`.

**As functions.**  `times.read` turns a folder of records into times, or `times.times_of` turns the
traces; `verdict.judge` turns times into a verdict, and is the only place that does.
`remedies.remedies` adds what each remedy gains, and `words.lines` says it all.

**What is recorded.**  `StepTrace` and `LoopTrace` write, on each rank and for each step:

- the meetings: where the rank came to what all ranks do together, and when that was over.  The
  most important one is the sum of the gradient: it begins for a rank when its last piece is ready,
  and ends when the last sum is there.  With FSDP on CPUs each sum is one, and each time
  that weights are gathered.  Others are the buffers of rank 0, Lightning's question for
  SIGTERM, metrics with `sync_dist=True`, and barriers.
- when each piece of the gradient was ready, and when its sum was there
- the parts of the rank's own time: loader, copies to the device, forward, backward, optimizer,
  validation, Python's garbage collection; what is none of these is "between": other callbacks,
  loggers
- how many numbers the rank's batch had

**How lateness is attributed.**  All ranks leave a meeting at about the same time, and nobody leaves
before the last has come.  So for rank i and meeting n

    own_i(n)   from the end of meeting n - 1 until rank i comes to meeting n
    base(n)    the lower median of own_i(n) over the ranks: what a step takes where nobody is late
    last(n)    the rank with the largest own_i(n): the others wait for it
    late(n)    max_i own_i(n) - base(n): what its lateness costs the job
    takes(n)   the least that any rank spends in meeting n: what the meeting itself takes

and a run takes the sum of max_i own_i(n) + takes(n).  No clocks of two ranks are compared for that.
The cost of a late rank goes to those parts of its own time that are longer than the others'.

Only a slow link needs a common clock: a sum of ring messages is over last where the link is slow.
The clocks of nodes are compared at the start of the trace.

**What it cannot see.**  A rank that waits for others in a way that is not listed above, such as a
collective with `async_op=True`, seems to work.  Ranks that are late in turn, by little, look like
chance.
"""
