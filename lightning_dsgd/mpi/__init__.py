"""A wing: messages between processes that mpiexec or srun has started travel by MPI."""
