"""What each flag of Megatron-LM and each option of torchrun means for a run file. No jax.

Names, choices and defaults are those of Megatron-LM's megatron/training/arguments.py. A flag is mapped to keys of a run
file, or it has a reason why it is ignored, makes the run deviate, or is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Takes = Literal["nothing", "an integer", "a number", "a word", "words"]


@dataclass(frozen=True)
class Flag:
    """`neutral` is the value with which the flag changes nothing, so that it is ignored; `default` is Megatron-LM's."""

    name: str
    takes: Takes
    outcome: Literal["mapped", "ignored", "deviates", "refused"]
    reason: str = ""
    default: Any = None
    neutral: str | None = None
    choices: tuple[str, ...] = ()


def _mapped(name: str, takes: Takes = "an integer", default: Any = None, choices: str = "") -> Flag:
    return Flag(name, takes, "mapped", default=default, choices=tuple(choices.split()))


# `parallax.translate.mapping` says to which keys.
MAPPED = (
    _mapped("tensor-model-parallel-size", default=1),
    _mapped("pipeline-model-parallel-size", default=1),
    _mapped("context-parallel-size", default=1),
    _mapped("expert-model-parallel-size", default=1),
    _mapped("num-experts"),
    _mapped("sequence-parallel", "nothing", False),
    _mapped("use-distributed-optimizer", "nothing", False),
    _mapped("cp-comm-type", "words", ["p2p"]),
    _mapped("num-layers-per-virtual-pipeline-stage"),
    _mapped("num-virtual-stages-per-pipeline-rank"),
    _mapped("recompute-granularity", "a word", choices="full selective"),
    _mapped("recompute-activations", "nothing", False),
    _mapped("recompute-method", "a word", choices="uniform block"),
    _mapped("recompute-num-layers"),
    _mapped("recompute-modules", "words", ["core_attn"]),
    _mapped("micro-batch-size"),
    _mapped("global-batch-size"),
    _mapped("rampup-batch-size", "words"),
    _mapped("train-iters"),
    _mapped("train-samples"),
    _mapped("seq-length"),
    _mapped("seed", default=1234),
    _mapped("bf16", "nothing", False),
    _mapped("fp16", "nothing", False),
    _mapped("eval-interval", default=1000),
    _mapped("eval-iters", default=100),
    _mapped("lr", "a number"),
    _mapped("min-lr", "a number", 0.0),
    _mapped("lr-decay-style", "a word", "linear", "constant linear cosine inverse-square-root WSD"),
    _mapped("lr-decay-iters"),
    _mapped("lr-decay-samples"),
    _mapped("lr-warmup-fraction", "a number"),
    _mapped("lr-warmup-iters", default=0),
    _mapped("lr-warmup-samples", default=0),
    _mapped("weight-decay", "a number", 0.01),
    _mapped("adam-beta1", "a number", 0.9),
    _mapped("adam-beta2", "a number", 0.999),
    _mapped("adam-eps", "a number", 1e-8),
    _mapped("clip-grad", "a number", 1.0),
    _mapped("num-layers"),
    _mapped("hidden-size"),
    _mapped("ffn-hidden-size"),
    _mapped("num-attention-heads"),
    _mapped("group-query-attention", "nothing", False),
    _mapped("num-query-groups", default=1),
    _mapped("kv-channels"),
    _mapped("max-position-embeddings"),
    _mapped("vocab-size"),
    _mapped("padded-vocab-size"),
    _mapped("make-vocab-size-divisible-by", default=128),
    _mapped("position-embedding-type", "a word", "learned_absolute", "learned_absolute rope mrope relative none"),
    _mapped("use-rotary-position-embeddings", "nothing", False),
    _mapped("rotary-base", "a number", 10_000),
    _mapped("use-rope-scaling", "nothing", False),
    _mapped("rope-scaling-factor", "a number", 8.0),
    _mapped("swiglu", "nothing", False),
    _mapped("normalization", "a word", "LayerNorm", "LayerNorm RMSNorm"),
    _mapped("norm-epsilon", "a number", 1e-5),
    _mapped("untie-embeddings-and-output-weights", "nothing", False),
    _mapped("disable-bias-linear", "nothing", False),
    _mapped("add-qkv-bias", "nothing", False),
    _mapped("data-path", "words"),
    _mapped("mock-data", "nothing", False),
    _mapped("split", "a word", "969,30,1"),
    _mapped("tokenizer-type", "a word"),
    _mapped("tokenizer-model", "a word"),
    _mapped("reset-attention-mask", "nothing", False),
    _mapped("save", "a word"),
    _mapped("load", "a word"),
    _mapped("save-interval"),
    _mapped("save-retain-interval"),
    _mapped("log-interval", default=100),
)

# By reason. `name` takes nothing, `name=` a value, `name=1` a value of which this one changes nothing, `name=*` more.
IGNORED = {
    "parallax logs loss, gradient norm, throughput and MFU of every step by itself": """
        log-params-norm log-num-zeros-in-grad log-throughput log-progress log-energy log-straggler timing-log-level=
        timing-log-option= no-barrier-with-level-1-timing tensorboard-log-interval= tensorboard-queue-size=
        log-timers-to-tensorboard log-loss-scale-to-tensorboard no-log-loss-scale-to-tensorboard
        log-learning-rate-to-tensorboard no-log-learning-rate-to-tensorboard log-batch-size-to-tensorboard
        log-validation-ppl-to-tensorboard log-memory-to-tensorboard log-world-size-to-tensorboard logging-level=
        disable-straggler-on-startup straggler-ctrlr-port= straggler-minmax-count= config-logger-dir=""",
    "TensorBoard events are in log.dir/tensorboard": "tensorboard-dir=",
    "parallax logs to files alone": """
        wandb-project= wandb-entity= wandb-exp-name= wandb-save-dir= no-one-logger one-logger-project=
        one-logger-run-name= one-logger-async app-tag-run-name= app-tag-run-version=""",
    "a profiler of PyTorch and CUDA": """
        profile profile-step-start= profile-step-end= profile-ranks=* use-pytorch-profiler record-memory-history
        memory-snapshot-path= run-workload-inspector-server""",
    "a choice of kernels; XLA makes its own": """
        transformer-impl= use-flash-attn attention-backend= use-mcore-models use-legacy-models openai-gelu
        no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion
        cross-entropy-loss-fusion cross-entropy-fusion-impl= no-persist-layer-norm no-gradient-accumulation-fusion
        use-te-activation-func use-fused-weighted-squared-relu deterministic-mode te-rng-tracker inference-rng-tracker
        enable-cuda-graph external-cuda-graph cuda-graph-impl= cuda-graph-scope= cuda-graph-warmup-steps=
        delay-wgrad-compute defer-embedding-wgrad-compute wgrad-deferral-limit= onnx-safe= enable-experimental
        apply-query-key-layer-scaling""",
    "memory and start-up of PyTorch; XLA plans memory": """
        manual-gc manual-gc-interval= no-manual-gc-eval empty-unused-memory-level= use-cpu-initialization
        data-parallel-random-init no-clone-scatter-output-in-embedding no-create-attention-mask-in-dataloader
        lazy-mpu-init= init-model-with-meta-device distribute-saved-activations train-sync-interval= local-rank=
        no-pin-cpu-grads no-pin-cpu-params no-initialization""",
    "communication of PyTorch; XLA schedules its own": """
        overlap-grad-reduce overlap-param-gather overlap-param-gather-with-optimizer-step no-align-grad-reduce
        no-align-param-gather ddp-num-buckets= ddp-bucket-size= ddp-pad-buckets-for-high-nccl-busbw
        ddp-average-in-collective ddp-reduce-scatter-with-fp32-accumulation no-gradient-reduce-div-fusion
        tp-comm-overlap tp-comm-overlap-cfg= disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs
        tp-comm-overlap-rs-dgrad disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad disable-tp-comm-split-ag
        disable-tp-comm-split-rs tp-comm-bootstrap-backend= no-async-tensor-model-parallel-allreduce
        no-overlap-p2p-communication overlap-p2p-communication overlap-p2p-communication-warmup-flush
        pipeline-model-parallel-comm-backend= high-priority-stream-groups=* distributed-backend=
        distributed-timeout-minutes= distributed-timeout-seconds-after-init= no-scatter-gather-tensors-in-pipeline
        use-ring-exchange-p2p use-nccl-ub disable-symmetric-registration use-sharp sharp-enabled-group=
        nccl-communicator-config-path= use-tp-pp-dp-mapping disable-gloo-process-groups enable-gloo-process-groups
        symmetric-ar-type=""",
    "parallax spreads layers evenly, to one more or less, and the vocabulary over every pipeline rank": """
        decoder-first-pipeline-num-layers= decoder-last-pipeline-num-layers= account-for-embedding-in-pipeline-split
        account-for-loss-in-pipeline-split""",
    "parallax's interleaved order has groups of its own (docs/pipeline.md)": """
        microbatch-group-size-per-virtual-pipeline-stage=""",
    "parallax's checkpoints are written in the background, and any layout reads them": """
        ckpt-format= dist-ckpt-format= use-dist-ckpt ckpt-fully-parallel-save no-ckpt-fully-parallel-save
        ckpt-fully-parallel-load ckpt-assume-constant-structure dist-ckpt-strictness= dist-ckpt-save-pre-mcore-014
        dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient async-save
        use-persistent-ckpt-worker auto-detect-ckpt-format no-save-optim no-save-rng non-persistent-save-interval=
        non-persistent-ckpt-type= non-persistent-global-ckpt-dir= non-persistent-local-ckpt-dir=
        non-persistent-local-ckpt-algo= replication replication-jump= replication-factor= ckpt-convert-format=
        ckpt-convert-save= ckpt-convert-update-legacy-dist-opt-format""",
    "of loading; `parallax train --resume` goes on from log.dir": """
        exit-on-missing-checkpoint override-opt_param-scheduler override-opt-param-scheduler
        use-checkpoint-opt_param-scheduler use-checkpoint-opt-param-scheduler no-strict-fsdp-dtensor-load
        no-use-tokenizer-model-from-checkpoint-args""",
    "parallax saves and stops on SIGTERM by itself": "exit-signal-handler",
    "a run ends at train.steps, or on SIGTERM": "exit-interval= exit-duration-in-mins=",
    "accumulation, softmax and optimizer are float32 in parallax": """
        accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 disable-bf16-reduced-precision-matmul
        use-precision-aware-optimizer main-grads-dtype=fp32""",
    "bfloat16 and float32 need no loss scale": """
        loss-scale= initial-loss-scale= min-loss-scale= loss-scale-window= hysteresis=""",
    "steps whose gradients are not finite are left out (train.max_skipped)": """
        no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad check-for-spiky-loss check-for-large-grads
        rerun-mode= error-injection-rate= error-injection-type= check-weight-hash-across-dp-replicas-interval=""",
    "not of Adam": """
        sgd-momentum= muon-momentum= muon-no-split-qkv muon-use-nesterov muon-scale-mode= muon-fp32-matmul-prec=
        muon-num-ns-steps= muon-tp-mode= muon-extra-scale-factor=""",
    "an indexed dataset holds tokens, not text": """
        vocab-file= merge-file= tokenizer-metadata= tiktoken-pattern= tiktoken-num-special-tokens=
        tiktoken-special-tokens=* legacy-tokenizer trust-remote-code vocab-extra-ids= sft-tokenizer-prompt-format=""",
    "parallax maps files by itself; the order of samples follows from train.seed": """
        data-cache-path= no-mmap-bin-files num-workers= num-dataset-builder-threads= object-storage-cache-path=
        mid-level-dataset-surplus= allow-ambiguous-pad-tokens dataloader-type= disable-msc""",
    "every token counts the same in parallax": "calculate-per-token-loss",
    "the batch must divide in parallax": "decrease-batch-size-if-needed",
    "the same norm; its gain is stored as it is": "apply-layernorm-1p",
    "of restarting processes; a run that stopped is started again": """
        inprocess-restart inprocess-max-iterations= inprocess-monitor-thread-interval=
        inprocess-monitor-process-interval= inprocess-progress-watchdog-interval= inprocess-heartbeat-interval=
        inprocess-soft-timeout= inprocess-hard-timeout= inprocess-heartbeat-timeout= inprocess-barrier-timeout=
        inprocess-completion-timeout= inprocess-last-call-wait= inprocess-termination-grace-time=
        inprocess-granularity= inprocess-active-world-size= inprocess-empty-cuda-cache enable-ft-package
        calc-ft-timeouts adlr-autoresume adlr-autoresume-interval=""",
    "of inference": """
        inference-batch-times-seqlen-threshold= max-tokens-to-oom= flash-decode use-legacy-static-engine
        inference-max-requests= inference-max-seq-length= inference-max-batch-size= inference-dynamic-batching
        inference-dynamic-batching-buffer-size-gb= inference-dynamic-batching-block-size=
        inference-dynamic-batching-buffer-guaranteed-fraction= inference-dynamic-batching-buffer-overflow-factor=
        inference-dynamic-batching-max-requests-override= inference-dynamic-batching-max-tokens-override=
        inference-dynamic-batching-num-cuda-graphs= inference-dynamic-batching-track-paused-request-events
        inference-dynamic-batching-unified-memory-level= decode-only-cuda-graphs nccl-all-reduce-for-prefill
        mlp-chunks-for-prefill= disable-chunked-prefill inference-wandb-logging-step-interval= test-mode""",
    "of other models (BERT, T5)": """
        bert-no-binary-head sample-rate= mask-prob= short-seq-prob= output-bert-embeddings bert-embedder-type=
        retriever-seq-length= relative-attention-num-buckets= relative-attention-max-distance=""",
    "of float8; this run has none": """
        fp8-recipe= fp8-quantizer-factory= fp8-margin= fp8-interval= fp8-amax-history-len= fp8-amax-compute-algo=
        no-fp8-wgrad fp8-param-gather first-last-layers-bf16 num-layers-at-start-in-bf16= num-layers-at-end-in-bf16=
        fp4-recipe= fp4-quantizer-factory= fp4-param-gather keep-fp8-transpose-cache
        reuse-grad-buf-for-mxfp8-param-ag""",
}
DEVIATES = {
    "parallax has no dropout": "attention-dropout=0 hidden-dropout=0",
    "parallax draws weights with a standard deviation of 0.02, less at the end of a branch": """
        init-method-std=0.02 embedding-init-method-std=0.02 init-method-xavier-uniform""",
    "weights of Megatron-LM are not read; the run begins with new ones": """
        pretrained-checkpoint= finetune ckpt-step= no-load-optim no-load-rng load-main-params-from-ckpt""",
    "parallax has no float8 or float4; products are bfloat16": "fp8-format= fp4-format=",
    "parallax reduces and keeps these in float32": """
        grad-reduce-in-bf16 main-params-dtype=fp32 exp-avg-dtype=fp32 exp-avg-sq-dtype=fp32 fp16-lm-cross-entropy""",
    "the residual stream is bfloat16": "fp32-residual-connection",
    "optimizer states and activations stay on the devices": """
        cpu-offloading-num-layers=0 optimizer-cpu-offload optimizer-offload-fraction=
        use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d""",
    "optimizer states are sharded over the whole of dp": "num-distributed-optimizer-instances=1",
    "positions go on counting over documents": "reset-position-ids",
    "the loss counts the tokens that end documents, too": "eod-mask-loss",
    "channels are rotated in halves, not in pairs: the same model in another order": "rotary-interleaved",
    "warm-up begins at 0": "lr-warmup-init=0",
    "evaluation reads train.eval_batches batches of the mixture": "full-validation multiple-validation-sets",
}
REFUSED = {
    "sharded weights (FSDP) are not built yet; use --use-distributed-optimizer": """
        use-megatron-fsdp use-custom-fsdp use-torch-fsdp2 data-parallel-sharding-strategy=no_shard fsdp-double-buffer
        suggested-communication-unit-size= enable-full-sharding-in-hsdp torch-fsdp2-no-reshard-after-forward""",
    "expert parallelism is not built yet; leave the flags of experts out": """
        expert-tensor-parallel-size=1 moe-layer-freq= moe-ffn-hidden-size= moe-shared-expert-intermediate-size=
        moe-shared-expert-overlap moe-grouped-gemm moe-use-legacy-grouped-gemm moe-layer-recompute moe-extended-tp
        moe-use-upcycling moe-router-load-balancing-type=* moe-router-dtype= moe-router-fusion
        moe-router-score-function= moe-router-topk= moe-router-pre-softmax moe-router-num-groups=
        moe-router-group-topk= moe-router-topk-scaling-factor= moe-router-enable-expert-bias
        moe-router-bias-update-rate= moe-router-force-load-balancing moe-router-padding-for-fp8 moe-aux-loss-coeff=*
        moe-z-loss-coeff= moe-input-jitter-eps= moe-per-layer-logging moe-token-dispatcher-type= moe-enable-deepep
        moe-deepep-num-sms= moe-permute-fusion moe-expert-capacity-factor= moe-pad-expert-input-to-capacity
        moe-token-drop-policy= moe-apply-probs-on-input overlap-moe-expert-parallel-comm moe-upcycling-granularity=
        moe-pad-experts-for-cuda-graph-inference""",
    "parallax shares attention by ring or all-gather; use --cp-comm-type p2p or allgather": """
        hierarchical-context-parallel-sizes=*""",
    "parallax spreads layers by itself; use --num-virtual-stages-per-pipeline-rank": "pipeline-model-parallel-layout=",
    "models/ has no such attention; leave it out, or copy a model file and write it there": """
        window-size= window-attn-skip-freq= softmax-type=vanilla qk-layernorm qk-l2-norm multi-latent-attention
        q-lora-rank= kv-lora-rank= qk-head-dim= qk-pos-emb-head-dim= v-head-dim= cache-mla-latents
        rotary-percent=1 rotary-seq-len-interpolation-factor=1 rotary-scaling-factor=1 no-rope-freq= rope-type=rope
        mscale= mscale-all-dim= mrope-section=* no-position-embedding""",
    "models/ has no such layer; leave it out, or copy a model file and write it there": """
        squared-relu quick-geglu activation-func-clamp-value= glu-linear-offset=0 mtp-num-layers=0
        mtp-loss-scaling-factor= apply-residual-connection-post-layernorm spec=* heterogeneous-layers-config-path=
        heterogeneous-layers-config-encoded-json= hybrid-attention-ratio=0 hybrid-mlp-ratio=0
        hybrid-override-pattern= mamba-state-dim= mamba-head-dim= mamba-num-groups= mamba-num-heads= is-hybrid-model
        disable-mamba-mem-eff-path""",
    "parallax has AdamW alone, with one learning rate and one weight decay; use --optimizer adam": """
        optimizer=adam decoupled-lr= decoupled-min-lr= start-weight-decay= end-weight-decay=
        weight-decay-incr-style=constant lr-wsd-decay-style= lr-wsd-decay-samples= lr-wsd-decay-iters=
        dump-param-to-param-group-map=""",
    "parallax trains on every batch; leave it out": "iterations-to-skip=* result-rejected-tracker-filename=",
    "parallax holds out a share of each source; use --data-path and --split": """
        train-data-path=* valid-data-path=* test-data-path=* per-split-data-args-path=""",
    "the file that it names is not read; give its flags here": "data-args-path= yaml-cfg=",
    "the checkpoint is not read; give its sizes as flags": "use-checkpoint-args use-mp-args-from-checkpoint-args",
    "parallax trains decoders alone; use --num-layers and --seq-length": """
        encoder-num-layers= decoder-num-layers= encoder-seq-length= decoder-seq-length=""",
    "parallax pretrains alone; leave it out": """
        skip-train sft perform-rl-step rl-prompts-per-eval= grpo-prompts-per-step= grpo-group-size= grpo-iterations=
        grpo-clamp-eps-lower= grpo-clamp-eps-upper= grpo-kl-beta= grpo-entropy-term-weight=
        grpo-filter-groups-with-same-reward grpo-default-temperature= grpo-default-top-p=
        langrl-inference-server-type= langrl-inference-server-conversation-template= langrl-external-server
        langrl-env-config= rl-offload-optimizer-during-inference rl-offload-kv-cache-during-training
        rl-remove-kv-cache-during-training rl-reset-cuda-graphs rl-partial-rollouts
        rl-inference-logprobs-is-correction rl-importance-sampling-truncation-coef=
        rl-calculate-intra-group-similarity rl-use-sequence-packing rl-sequence-packing-bin-size=
        rl-sequence-packing-algo=""",
    "parallax trains decoders of text alone; leave it out": """
        retro-project-dir= retro-add-retriever retro-cyclic-train-iters= retro-encoder-layers=
        retro-encoder-hidden-dropout= retro-encoder-attention-dropout= retro-num-neighbors=
        retro-num-retrieved-chunks= retro-attention-gate= retro-no-verify-neighbor-count ict-head-size=
        biencoder-projection-dim= biencoder-shared-query-context-model ict-load= bert-load= titles-data-path=
        query-in-block-prob= use-one-sent-docs evidence-data-path= retriever-report-topk-accuracies=*
        retriever-score-scaling block-data-path= embedding-path= indexer-batch-size= indexer-log-interval=
        num-classes= img-h= img-w= num-channels= patch-dim= classes-fraction= data-per-class-fraction=
        no-data-sharding head-lr-mult= vision-pretraining vision-pretraining-type= vision-backbone-type=
        swin-backbone-type= mask-type= mask-factor= iter-per-epoch= dino-local-img-size= dino-local-crops-number=
        dino-head-hidden-size= dino-bottleneck-size= dino-freeze-last-layer= dino-norm-last-layer
        dino-warmup-teacher-temp= dino-teacher-temp= dino-warmup-teacher-temp-epochs=""",
    "float8 by kitchen recipes is not built; leave it out": "kitchen-config-file= kitchen-recipe-number=",
    "no longer a flag of Megatron-LM; use --micro-batch-size": "batch-size=",
    "no longer a flag of Megatron-LM; use --lr-warmup-fraction": "warmup=",
    "no longer a flag of Megatron-LM; use --tensor-model-parallel-size": "model-parallel-size=",
    "no longer a flag of Megatron-LM; use --recompute-activations or --recompute-granularity": "checkpoint-activations",
}
TORCHRUN = {
    "how torchrun's processes find each other; a run file has none of it": """
        node-rank= master-addr= master-port= rdzv-backend= rdzv-endpoint= rdzv-id= rdzv-conf= standalone local-addr=
        role= start-method= use-env virtual-local-rank""",
    "how torchrun restarts and logs its processes; a run file has none of it": """
        max-restarts= monitor-interval= log-dir= redirects= tee= r= t= local-ranks-filter= logs-specs=
        event-log-handler= numa-binding= signals-to-handle= no-python run-path m module""",
}


def _by_reason(outcome: Literal["ignored", "deviates", "refused"], table: dict[str, str]) -> Iterator[Flag]:
    for reason, names in table.items():
        for word in names.split():
            name, equals, value = word.partition("=")
            takes: Takes = "words" if value == "*" else "a word" if equals else "nothing"
            yield Flag(name, takes, outcome, reason, neutral=value if value not in ("", "*") else None)


FLAGS = {
    flag.name: flag
    for flag in (
        *MAPPED,
        *_by_reason("ignored", IGNORED),
        *_by_reason("deviates", DEVIATES),
        *_by_reason("refused", REFUSED),
    )
}
TORCHRUN_OPTIONS = {
    "nnodes": Flag("nnodes", "a word", "mapped", default="1"),
    "nproc-per-node": Flag("nproc-per-node", "a word", "mapped", default="1"),
    **{flag.name: flag for flag in _by_reason("ignored", TORCHRUN)},
}
