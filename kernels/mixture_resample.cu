/* Samples of mixtures on the GPU: the thread that finds an ancestor (resample_block.cuh) draws the sample as well, so that a
 * row of up to RESAMPLE_BLOCK components and draws takes one launch. Contract: mixture_resample.h.
 * This file includes itself once for float and once for double (for_each_real.h). */
#ifndef REAL
#include "mixture_resample.h"

#include "cuda_block.cuh"
#define MDPS_FILE "mixture_resample.cu"
#include "for_each_real.h"

int mixture_resample_cuda(const void *parameters, int64_t, int is_double, void *stream) {
    const MixtureResample *p = (const MixtureResample *)parameters;
    return is_double ? launch_rows_f64(p->resample, *p, whole_row_f64, draws_f64, stream)
                     : launch_rows_f32(p->resample, *p, whole_row_f32, draws_f32, stream);
}
#else
#include "real_math.h"

#include "draw.h"

#include "resample_math.h"

#include "resample_block.cuh"

/* What the samples of a row are made of. */
typedef struct {
    Source source;
    const REAL *means, *bandwidths;
    bool good;
    int64_t *ancestors;
    REAL *samples;
} FN(MixtureRow);

/* top: of the log-weights. */
DEVICE FN(MixtureRow) FN(mixture_row)(const MixtureResample &p, int64_t b, Source s, REAL top) {
    const Resample &r = p.resample;
    const REAL *bandwidths = (const REAL *)p.bandwidths + (p.bandwidths_per_row ? b * p.D : 0);
    bool good = top < (REAL)INFINITY;
    for (int64_t d = 0; d < p.D; d++) good &= bandwidths[d] >= 0;
    return {
        s, (const REAL *)p.means + b * r.N * p.D, bandwidths, good, r.ancestors + b * r.M, (REAL *)p.samples + b * r.M * p.D};
}

/* Sample m, of component j. */
DEVICE void FN(draw_sample)(const MixtureResample &p, const FN(MixtureRow) &row, int64_t m, int64_t j) {
    const int64_t D = p.D, A = p.A, G = D - A;
    const REAL *mean = row.means + j * D;
    REAL *sample = row.samples + m * D;
    row.ancestors[m] = j;
    for (int64_t g = 0; g < G; g++) {
        REAL x = mean[g] + row.bandwidths[g] * FN(draw_one_normal)(row.source, m * G + g);
        sample[g] = row.good ? x : (REAL)NAN;
    }
    for (int64_t a = 0; a < A; a++) {
        const REAL bandwidth = row.bandwidths[G + a], concentration = 1 / (bandwidth * bandwidth);
        REAL x = FN(wrap)(mean[G + a] + FN(draw_one_von_mises)(row.source, (uint32_t)(m * A + a), concentration));
        sample[G + a] = row.good ? x : (REAL)NAN;
    }
}

static __global__ void FN(whole_row)(Scaled<MixtureResample> q) {
    const Resample &p = q.p.resample;
    const int64_t b = blockIdx.x;
    const Source s = source_of_row(p.seed, b);
    REAL top;
    const int64_t *values = FN(prepare_row)(p, b, s, q.scale, &top);
    const FN(MixtureRow) row = FN(mixture_row)(q.p, b, s, top);
    take_draws(p, s, values, 0, p.M, [&](int64_t m, int64_t j) { FN(draw_sample)(q.p, row, m, j); });
}

static __global__ void FN(draws)(Scaled<MixtureResample> q) {
    const Resample &p = q.p.resample;
    const int64_t M = p.M, tiles = (M + DRAWS - 1) / DRAWS, b = blockIdx.x / tiles, first = blockIdx.x % tiles * DRAWS;
    const Source s = source_of_row(p.seed, b);
    const FN(MixtureRow) row = FN(mixture_row)(q.p, b, s, FN(merge_tops)(p, b));
    take_draws(p, s, row_values(p, b), first, first + DRAWS < M ? first + DRAWS : M,
               [&](int64_t m, int64_t j) { FN(draw_sample)(q.p, row, m, j); });
}
#endif
