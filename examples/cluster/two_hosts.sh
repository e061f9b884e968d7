#!/usr/bin/env bash
# Two machines of four processes each. Run the same line on both; host0 is the name of one of them:
#   examples/cluster/two_hosts.sh host0 examples/18_train_on_a_mesh.py
set -euo pipefail
host0=${1:?"usage: two_hosts.sh HOST0 PROGRAM [ARGUMENT ...]"}
shift
exec torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-id train \
  --rdzv-endpoint "$host0:${PORT:-29400}" "$@"
