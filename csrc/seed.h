/* What drawing operators share: their seed and stream arguments, and resampling. */
#ifndef MDPS_SEED_H
#define MDPS_SEED_H

#include "operator.h"
#include "philox.h"
#include "resample.h"

/* The seed tensor () or (B) and the stream; *seed is what the kernel gets. */
static inline Tensor take_seed(Call *call, StableIValue value, StableIValue stream, Seed *seed) {
    Tensor x = take_shared_indices(call, value, "seed", 1);
    *seed = (Seed){.seed = x.data, .per_row = x.dim == 1, .stream = take_int(stream)};
    expect(call, seed->stream >= 0 && seed->stream < (int64_t)1 << 32, "stream: expected 0 to 2^32 - 1, got %lld",
           (long long)seed->stream);
    return x;
}

/* Where no other argument knows the batch: `rows` share a seed (); seeds (B) come with rows = 0. */
static inline int64_t take_rows(Call *call, const Tensor *seed, StableIValue rows) {
    int64_t n = take_int(rows);
    expect(call, n >= 0 && n <= INT32_MAX, "rows: expected 0 to 2^31 - 1, got %lld", (long long)n);
    return !ok(call) ? 0 : seed->dim == 1 ? seed->size[0] : n;
}

/* A tensor to allocate reals like: on the device of x, float32 or float64. */
static inline Tensor real_like(const Tensor *x, bool is_double) {
    Tensor y = *x;
    y.dtype = is_double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
    y.is_double = is_double;
    return y;
}

/* In csrc/resample.c. Completes p, which holds seed, M and scheme, for the rows of log_weights, with scratch memory; the caller
 * sets p->ancestors. */
void resample_parameters(Call *call, const Tensor *log_weights, Resample *p);
/* Fills the ancestors. */
void resample_rows(Call *call, const Tensor *log_weights, Kernels kernels, Resample *p);
#endif
