/* Ancestors on the GPU: a row has one block and one launch, or parts and four launches (resample_block.cuh, which has the idea
 * and the cost); residual has one block whatever N, since its second weights wait for the first. Contract: resample.h.
 * This file includes itself once for float and once for double (for_each_real.h). */
#ifndef REAL
#include "resample.h"

#include "cuda_block.cuh"
#define MDPS_FILE "resample.cu"
#include "for_each_real.h"

int resample_cuda(const void *parameters, int64_t, int is_double, void *stream) {
    const Resample *p = (const Resample *)parameters;
    return is_double ? launch_rows_f64(*p, *p, whole_row_f64, draws_f64, stream)
                     : launch_rows_f32(*p, *p, whole_row_f32, draws_f32, stream);
}
#else
#include "real_math.h"

#include "resample_math.h"

#include "resample_block.cuh"

static __global__ void FN(whole_row)(Scaled<Resample> q) {
    const int64_t b = blockIdx.x;
    const Source s = source_of_row(q.p.seed, b);
    int64_t *ancestors = q.p.ancestors + b * q.p.M;
    REAL top;
    const int64_t *values = FN(prepare_row)(q.p, b, s, q.scale, &top);
    take_draws(q.p, s, values, 0, q.p.M, [&](int64_t i, int64_t j) { ancestors[i] = j; });
}

static __global__ void FN(draws)(Scaled<Resample> q) {
    const int64_t M = q.p.M, tiles = (M + DRAWS - 1) / DRAWS, b = blockIdx.x / tiles, first = blockIdx.x % tiles * DRAWS;
    int64_t *ancestors = q.p.ancestors + b * M;
    take_draws(q.p, source_of_row(q.p.seed, b), row_values(q.p, b), first, first + DRAWS < M ? first + DRAWS : M,
               [&](int64_t i, int64_t j) { ancestors[i] = j; });
}
#endif
