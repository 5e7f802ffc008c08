#!/bin/bash
# A run on several nodes of a SLURM cluster: sbatch experiments/launch/slurm.sh RUN.toml --mesh.fsdp 8 ...
# It is put into the queue again when its time is over, and goes on from its last checkpoint.
#SBATCH --job-name=fp8rl
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=fp8rl-%j.log

status=0
# one process a node takes all its GPUs; SLURM says how many there are and where process 0 is
srun --kill-on-bad-exit=1 --label fp8rl train "$@" --resume || status=$?
# 75: stopped; above: a process was lost, which srun tells by its signal. Nothing that was saved is gone. Others are faults
# that another start would meet again.
if [ "$status" -ge 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 50 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
