#!/bin/bash
GPUS=8
NODES=1
WORLD_SIZE=$(($GPUS*$NODES))
TP_SIZE=1
DTYPE="fp8"
GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-128}
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS
    --nnodes $NODES
)
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --swiglu
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size $GLOBAL_BATCH_SIZE
    --lr 0.00015     # of a smaller model
    --clip-grad 1.0
    --bf16
    --grad-reduce-in-bf16
    --cross-entropy-loss-fusion
    --calculate-per-token-loss
)
if [[ "$DTYPE" == "fp8" ]]; then
    TRAINING_ARGS+=(
        "--fp8-format hybrid"
        "--fp8-param-gather"
    )
fi
PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP_SIZE
    # --pipeline-model-parallel-size 4
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} \
    ${PARALLEL_ARGS[@]}
