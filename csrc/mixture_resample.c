/* Schema and registration of mixture_resample. Contract: kernels/mixture_resample.h. */
#include "mixture_resample.h"

#include "mixture.h"

void mixture_resample_rows(Call *call, const Mixture *mixture, int64_t n_angular, const Resample *r, const Tensor *samples) {
    MixtureResample p = {.resample = *r,
                         .D = mixture->means.size[2],
                         .A = n_angular,
                         .bandwidths_per_row = mixture->bandwidths.dim == 2,
                         .means = mixture->means.data,
                         .bandwidths = mixture->bandwidths.data,
                         .samples = samples->data};
    resample_rows(call, &mixture->log_weights, CPU_KERNELS(resample), &p.resample);
    run(call, &mixture->means, KERNELS(mixture_resample), &p, r->B * ((r->M + MIXTURE_DRAWS - 1) / MIXTURE_DRAWS), 8);
}

static void forward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "mixture_resample"};
    Tensor means = take_tensor(&call, stack[0], "means", 3);
    Tensor log_weights = take_tensor(&call, stack[1], "log_weights", 2);
    Tensor bandwidths = take_shared_tensor(&call, stack[2], "bandwidths", 2);
    Resample r = {.B = means.size[0], .N = means.size[1], .M = take_int(stack[4]), .scheme = (int)take_int(stack[6])};
    Tensor seed = take_seed(&call, stack[3], stack[7], &r.seed);
    const int64_t D = means.size[2], A = take_n_angular(&call, stack[5], D);
    expect_like(&call, &log_weights, "log_weights", &means, "means");
    expect_like(&call, &bandwidths, "bandwidths", &means, "means");
    expect_like(&call, &seed, "seed", &means, "means");
    expect_size(&call, &log_weights, "log_weights", 2, means.size);
    expect_size(&call, &bandwidths, "bandwidths", 2, (int64_t[]){r.B, D});
    expect_size(&call, &seed, "seed", 1, means.size);
    resample_parameters(&call, &log_weights, &r);
    Tensor ancestors = new_indices(&call, &log_weights, 2, (int64_t[]){r.B, r.M});
    r.ancestors = ancestors.data;
    Tensor samples = new_tensor(&call, &means, 3, (int64_t[]){r.B, r.M, D});
    expect(&call, r.M * A <= UINT32_MAX, "n_samples: expected fewer than 2^32 angles a row, got %lld", (long long)(r.M * A));
    mixture_resample_rows(&call, &(Mixture){means, log_weights, bandwidths}, A, &r, &samples);
    finish(&call, stack, 2, (Tensor[]){samples, ancestors});
}
OPERATOR(mixture_resample,
         "mixture_resample(Tensor means, Tensor log_weights, Tensor bandwidths, Tensor seed, SymInt n_samples, int n_angular, "
         "int scheme, int stream) -> (Tensor, Tensor)",
         forward)
