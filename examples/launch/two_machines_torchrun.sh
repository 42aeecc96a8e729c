#!/usr/bin/env bash
# Two machines by torchrun. Run the same line on each; MASTER is the name of one of them, the same on both:
#
#     MASTER=node0 examples/launch/two_machines_torchrun.sh RECIPE [--set KEY=VALUE ...]
#
# The recipe's `output` must be a folder that all machines see. The run begins once NODES machines are there. --resume
# is always given, so that after a fault on either machine the same line on both goes on from the last checkpoint.
set -euo pipefail
: "${MASTER:?name the machine that the others meet at: MASTER=node0 $0 RECIPE}"
: "${1:?name a recipe: MASTER=$MASTER $0 RECIPE}"

exec torchrun \
  --nnodes "${NODES:-2}" \
  --nproc-per-node "${GPUS:-8}" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$MASTER:${PORT:-29500}" \
  --rdzv-id "${RUN_ID:-vaswani}" \
  "$(dirname "$0")/../train_translation.py" --config "$@" --resume
