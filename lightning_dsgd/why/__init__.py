"""Why a job is stuck or slow: `lightning-dsgd why -- torchrun ... train.py`, without an edit.

**How the recorder gets in.** The command runs with the folder `inside` in front of PYTHONPATH. Each
Python process of the job then runs `inside/sitecustomize.py` before its program: it loads the
`sitecustomize` that the user has, and starts a recorder in those processes that are ranks
(`inside/lightning_dsgd_rank/entering.py` tells which). The recorder needs the standard library
alone. It replaces one function, `init_process_group`, by one that also tells when it is called; and
whatever fails in the recorder is swallowed there. What else a rank could notice: a daemon thread,
`faulthandler` for one real-time signal, for SIGTERM unless the program handles it, and for fatal
signals unless the program or the user has turned it on.

**What a rank writes.** One small file, written anew at each beat (a second): where its main thread
is; how far it has come in each process group, by torch's flight recorder, which numbers all
collectives, those that DDP calls from C++ too; whether it works, by the processor's time and the
bytes of its process and its children; how it has ended. Nothing grows with the run.

**How steps are timed.**  A `StepTrace` joins Lightning's Trainer (`inside/.../callbacks.py`); in
any other loop the first DDP of a rank, or its first model in FSDP, is recorded from the outside
(`inside/.../loops.py`).  This needs the package in the job's environment.  `slow` says what
`lab.diagnose` finds in the steps, and `compare` what has grown between two runs.

**What the watcher does.** It reads these files, and asks the ranks for the list of their recent
collectives where something seems wrong (`watch`). A rank that writes nothing any more, since its
program keeps Python's lock, is asked by the signal. A process that is gone without a last word was
killed. `reader` turns the files into `records`, and `verdict` is a function of these, which says
who waits for whom; `stacks` says what a collective is for, `causes` what is often behind a pattern,
`words` puts it into words.

**Why nobody waits for it.** The ranks wait for nothing: the thread reads a number from a file and
goes on. The watcher waits for its command, and for answers a bounded time. Without the watcher, or
where a disk is full, the job runs on.

**What it cannot see.** A torch older than 2.9 records no collectives of gloo: there, ranks that all
stand still are named by their stacks alone. A rank of another machine is seen if both share the
folder, and cannot be asked by a signal. Messages from one rank to another are not numbered.
"""
