#!/bin/bash
# A run on several hosts by Open MPI or MPICH, one process a host: experiments/launch/mpi.sh HOSTS RUN.toml ...
# HOSTS: names, with commas between them; process 0 is on the first one.
set -euo pipefail
hosts=$1
shift
names=${hosts//[!,]/}
mpirun --host "$hosts" -np "$((${#names} + 1))" \
    fp8rl train "$@" --resume --mesh.coordinator "${hosts%%,*}:29500"
