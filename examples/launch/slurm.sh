#!/usr/bin/env bash
# One job on several hosts under SLURM: sbatch examples/launch/slurm.sh
# Every host starts torchrun once; torchrun starts one rank per GPU and, if one dies, all of them again.
#SBATCH --job-name=shardwright
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail

TARGET=${TARGET:-examples/bytes_gpt.py:job}
PLAN=${PLAN:-plan.json}          # shardwright plan $TARGET --machine 2x8xH100 -o plan.json
RUN=${RUN:-runs/$SLURM_JOB_NAME} # on a file system that all hosts see
STEPS=${STEPS:-1000}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_host=${hosts%%$'\n'*} # no pipe to head, which ends scontrol by SIGPIPE now and then
mkdir -p "$RUN"
# Ranks that are started again must not find the addresses of those before them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# SIGTERM, 120 seconds before the time is over, makes the ranks save and end.
exec srun torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --max-restarts 10 \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$head_host:29500" \
    -m shardwright.train.worker \
    --target "$TARGET" --plan "$PLAN" --steps "$STEPS" \
    --losses "$RUN/losses.jsonl" --checkpoint "$RUN" --every 100 --keep 3
