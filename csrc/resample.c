/* Schema and registration of resample. Contract: kernels/resample.h. */
#include "resample.h"

#include "seed.h"

void resample_parameters(Call *call, const Tensor *log_weights, Resample *p) {
    p->B = log_weights->size[0], p->N = log_weights->size[1];
    expect(call, p->N > 0 && p->N <= INT32_MAX, "log_weights: expected 1 to 2^31 - 1 particles, got %lld", (long long)p->N);
    expect(call, p->M >= 0 && p->M < INT32_MAX, "n_samples: expected 0 to 2^31 - 2, got %lld", (long long)p->M);
    expect(call, p->scheme >= MULTINOMIAL && p->scheme <= RESIDUAL, "scheme: expected 0 to 3, got %d", p->scheme);
    p->log_weights = log_weights->data;
    p->chunks = p->B < 64 ? p->B : 64;
    bool needs_none = p->scheme == STRATIFIED || p->scheme == SYSTEMATIC;
    int64_t bytes = on_cuda(log_weights) ? resample_cuda_scratch(p) : needs_none ? 0 : p->chunks * RESAMPLE_SCRATCH(p->N);
    if (bytes > 0) p->scratch = new_scratch(call, log_weights, bytes);
}

void resample_rows(Call *call, const Tensor *log_weights, Kernels kernels, Resample *p) {
    int64_t rows = p->chunks ? p->B / p->chunks : 1;
    run(call, log_weights, kernels, p, p->chunks, ok(call) ? 1 + 8192 / (rows * (p->N + p->M + 1)) : 1);
}

static void forward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "resample"};
    Resample p = {.M = take_int(stack[2]), .scheme = (int)take_int(stack[3])};
    Tensor log_weights = take_tensor(&call, stack[0], "log_weights", 2);
    Tensor seed = take_seed(&call, stack[1], stack[4], &p.seed);
    expect_like(&call, &seed, "seed", &log_weights, "log_weights");
    expect_size(&call, &seed, "seed", 1, log_weights.size);
    resample_parameters(&call, &log_weights, &p);
    Tensor ancestors = new_indices(&call, &log_weights, 2, (int64_t[]){p.B, p.M});
    p.ancestors = ancestors.data;
    resample_rows(&call, &log_weights, KERNELS(resample), &p);
    finish(&call, stack, 1, (Tensor[]){ancestors});
}
OPERATOR(resample, "resample(Tensor log_weights, Tensor seed, SymInt n_samples, int scheme, int stream) -> Tensor", forward)
