"""The reference trainer: a small DeepSeek-V3-style FP8 mixture-of-experts pretraining run.

Every known source of nondeterminism in it is a named switch (`switches`), so that bitcheck can be
tried, tested and measured against known truth. `bitcheck reference train` runs it.

    configs       sizes and hyperparameters            train        the loop: it wires the rest together
    data          bytes of a text, by a counter        progress     a line a step, for people
    model         tokens in, losses out                schedule     learning rate of a step
    block         a mixer and a feed-forward           optimizer    AdamW on FP32 masters
    mla           multi-head latent attention          ema          average in CPU memory, by a thread
    ssm           Mamba-2 mixer                        rng          states of all generators
    moe, experts  routing; the experts' two GEMMs      checkpoint   everything, verified, whole or not at all
    mtp           one token further ahead              switches     the table of switches
    linear        FP8 in all three GEMMs               arrival      orders of summation, fixed or free

On several ranks, under torchrun:

    ranks         which groups this process is in      reduce       sums over ranks, `comm.reduce`
    exchange      tokens to their experts' rank        sharded      a checkpoint of all ranks
    pipeline      stages, in DualPipeV's order

Each operation that has forms is a plain function of tensors; modules and autograd functions call it
and know nothing of how it is done. A kernel for another device (`kernels`) takes the place of:

    fp8         quantize_rows, quantize_columns, quantize_blocks     the one cast
    gemm        gemm, wgrad                                          moe.wgrad
    dprob       reduce_dprob                                         moe.dprob
    moe         select_top, add_slots                                moe.topk, moe.combine
    norm        reduce_dweight                                       norm.dweight
    embedding   embedding_grad                                       embedding.backward
    attention   attend, attend_backward                              attention.backward
    scan        scan, scan_backward                                  ssm.backward
"""
