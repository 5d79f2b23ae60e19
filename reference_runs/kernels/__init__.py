"""The trainer's Triton kernels: each with a plain PyTorch reference beside it and no autotuning.

    casts            float32 -> e4m3 by integer bits; the scale of a tile
    quantise         1x128 and 128x1 (activations, gradients), 128x128 (weights)
    schedule         which expert and which rows a tile of a grouped GEMM works on
    gemm             FP8 GEMM, promoted every 128 K: fprop, dgrad and wgrad of a Linear
    grouped_gemm     the same over experts; the dprob epilogue (`atomic`, `serial`, `slots`)
    grouped_wgrad    an expert's weight gradient (`workspace`, `atomic`)
    topk             the chosen experts of a token (`stable`, `unstable`)
    swiglu           w1 x, w3 x -> silu(w1 x) * w3 x, forward and backward
    heads            MLA's queries, keys and values with RoPE, as an attention kernel takes them
    swiglu_quantise  the same with the quantisation before and after it
    combine          the K expert rows of a token -> one (`gather`, `atomic`)
    norm             RMSNorm, forward and backward; dweight (`two-stage`, `atomic`)
    embedding        the table's gradient (`sorted`, `atomic`)
    ssm              chunked state-space scan, forward
    ssm_backward     its gradients (`workspace`, `atomic`)
    adamw            one pass over a parameter, its master and its moments
    conv             a causal depthwise convolution and its SiLU
    slots            partial sums in their own slots, summed in index order

Every reduction over programs exists twice. The deterministic form gives each program a place of
its own to write and one program sums the places in index order, or lets the programs take turns.
The `atomic` form lets all programs add into one place, in the order in which they arrive.
The bits of a result also depend on block sizes and warps, so those are constants of each module.

Importing a module here imports triton; nothing else happens until a function is called. With
TRITON_INTERPRET=1 set before that import, everything runs on CPU tensors too (slowly; float32
outputs are exact, bfloat16 outputs are truncated instead of rounded).
"""
