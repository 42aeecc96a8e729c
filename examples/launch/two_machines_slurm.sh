#!/usr/bin/env bash
# Two machines by Slurm, from the root of the repository:
#
#     sbatch examples/launch/two_machines_slurm.sh RECIPE [--set KEY=VALUE ...]
#
# Two minutes before the time is up, and when the job is preempted, Slurm sends SIGTERM. Each process ends its update,
# a checkpoint is written, and the exit status is 143: the job then queues itself again and goes on from there. One task
# is one process of the run, without a launcher between them that would stand in the signal's way.
#SBATCH --job-name=vaswani
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -uo pipefail
: "${1:?name a recipe: sbatch $0 RECIPE}"

MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
MASTER_PORT="$((20000 + SLURM_JOB_ID % 10000))"
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"

srun --kill-on-bad-exit=1 bash -c '
  export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"
  exec python examples/train_translation.py --config "$@" --resume
' train "$@"
status=$?

if [ "$status" -eq 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
