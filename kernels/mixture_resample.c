/* Noise for a tile of samples, drawn in the order of philox_normal and philox_von_mises, then added to the ancestors' means.
 * Contract: mixture_resample.h. */
#ifndef REAL
#include "mixture_resample.h"
#define MDPS_FILE "mixture_resample.c"
#include "for_each_real.h"
#else
#include "real_math.h"

#include "draw.h"

/* Whether a row can be drawn from at all. */
INLINE bool FN(is_drawable)(int64_t N, int64_t D, const REAL *log_weights, const REAL *bandwidths) {
    int32_t good = 1;
    for (int64_t d = 0; d < D; d++) good &= bandwidths[d] >= 0;
#pragma omp simd reduction(& : good)
    for (int64_t n = 0; n < N; n++) good &= log_weights[n] < (REAL)INFINITY;
    return good;
}

/* Angular noise of n samples from number m on, (n, A). */
INLINE void FN(draw_angles)(Source s, int64_t m, int n, int A, const REAL *bandwidths, REAL *angle) {
    for (int first = 0; first < n * A; first += DRAW_TILE) {
        int count = n * A - first < DRAW_TILE ? n * A - first : DRAW_TILE;
        REAL concentration[DRAW_TILE];
        for (int i = 0; i < count; i++) {
            REAL bandwidth = bandwidths[(first + i) % A];
            concentration[i] = 1 / (bandwidth * bandwidth);
        }
        FN(draw_von_mises)(s, m * A + first, count, concentration, angle + first);
    }
}

CLONES void FN(mixture_resample)(int64_t begin, int64_t end, void *parameters) {
    const MixtureResample *p = parameters;
    const Resample *r = &p->resample;
    const int64_t N = r->N, M = r->M, D = p->D, tiles = (M + MIXTURE_TILE - 1) / MIXTURE_TILE;
    const int A = (int)p->A, G = (int)(D - A);
    REAL normal[MIXTURE_TILE * MOST_DIMENSIONS], angle[MIXTURE_TILE * MOST_DIMENSIONS];
    bool good = false;
    for (int64_t item = begin; item < end; item++) {
        const int64_t b = item / tiles, m = item % tiles * MIXTURE_TILE;
        const int n = M - m < MIXTURE_TILE ? (int)(M - m) : MIXTURE_TILE;
        const REAL *bandwidths = (const REAL *)p->bandwidths + (p->bandwidths_per_row ? b * D : 0);
        const REAL *means = (const REAL *)p->means + b * N * D;
        REAL *samples = (REAL *)p->samples + (b * M + m) * D;
        Source s = source_of_row(r->seed, b);
        if (item == begin || m == 0) good = FN(is_drawable)(N, D, (const REAL *)r->log_weights + b * N, bandwidths);
        if (G > 0) FN(draw_normal)(s, m * G, (n * G + 3) / 4 * 4, normal);
        if (A > 0) FN(draw_angles)(s, m, n, A, bandwidths + G, angle);
        for (int i = 0; i < n; i++) {
            const REAL *mean = means + r->ancestors[b * M + m + i] * D;
            REAL *sample = samples + i * D;
            for (int g = 0; g < G; g++) sample[g] = mean[g] + bandwidths[g] * normal[i * G + g];
            for (int a = 0; a < A; a++) sample[G + a] = FN(wrap)(mean[G + a] + angle[i * A + a]);
        }
        if (!good)
            for (int64_t i = 0; i < n * D; i++) samples[i] = (REAL)NAN;
    }
}
#endif
