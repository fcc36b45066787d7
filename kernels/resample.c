/* Resampling without a search and, for the ordered schemes, without a branch. Contract: resample.h.
 *
 * 1. Weights relative to the row's largest become integers of up to 50 bits, so that their cumulative sums C are exact: no
 *    rounding, the same bits in whatever order a machine adds, and a chain of one-cycle additions. What is lost is below
 *    2^-31 N of the largest weight for N = 2^31, 2^-45 for N <= 10^5, 2^-51 for N <= 4096.
 * 2. For each component, e_j = number of points below its upper end: y = C_j M / C_N, k = floor(y), e_j = k + (u_k < y - k),
 * since stratum k is the only one that y cuts. There is no loop over points and no search.
 * 3. Draws e_{j-1} to e_j are written, for ascending j, eight at a time and whatever their number: the next components
 * overwrite what is too much. So there is hardly a branch, and all between the log-weights and the ancestors stays in the L1
 * cache. Multinomial points need a look-up: a guide table (Chen & Asau 1974) of N buckets, made by the same steps, says where
 * to start; a short walk follows, one step on average.
 *
 * This file includes itself once for float and once for double (for_each_real.h).
 */
#ifndef REAL
#include "resample.h"
#define MDPS_FILE "resample.c"
#include "for_each_real.h"
#else
#include "real_math.h"

#include "resample_math.h"
#include "resample_row.h"

/* The row's largest log-weight; false, and nothing to be weighed, if the row has collapsed. */
INLINE bool FN(find_top)(int64_t N, const REAL *l, REAL *top) {
    REAL most = -INFINITY;
    int32_t finite = 1;
#pragma omp simd reduction(max : most) reduction(& : finite)
    for (int64_t n = 0; n < N; n++) {
        most = l[n] > most ? l[n] : most;
        finite &= l[n] < (REAL)INFINITY;
    }
    *top = most;
    return finite && most > -INFINITY;
}

/* Integer weights of a tile. */
INLINE void FN(weigh)(int n, const REAL *l, REAL top, double scale, int64_t *w) {
    for (int i = 0; i < n; i++) w[i] = FN(integer_weight)(l[i], top, scale);
}

INLINE void FN(accumulate)(int64_t N, const REAL *l, bool good, REAL top, int64_t *cumulative) {
    const double scale = fixed_point(N);
    int64_t sum = 0;
    for (int64_t first = 0; first < N; first += TILE) {
        int n = N - first < TILE ? (int)(N - first) : TILE;
        int64_t w[TILE];
        if (good) FN(weigh)(n, l + first, top, scale, w);
        for (int i = 0; i < n; i++) cumulative[first + i] = sum += good ? w[i] : 1;
    }
}

/* Two passes, for the total and for the draws; the weights of a row of up to KEPT particles are kept, others computed again. */
INLINE void FN(ordered)(const Resample *p, Source s, const REAL *l, REAL top, int64_t *ancestors) {
    const int64_t N = p->N, step = N > KEPT ? 0 : TILE;
    const double scale = fixed_point(N);
    Points points = {.M = p->M, .stratified = p->scheme == STRATIFIED};
    int64_t weight[KEPT], sum = 0;
    int64_t begin = 0;
    for (int64_t first = 0; first < N; first += TILE) {
        int n = N - first < TILE ? (int)(N - first) : TILE;
        int64_t *c = weight + first / TILE * step;
        FN(weigh)(n, l + first, top, scale, c);
        for (int i = 0; i < n; i++) points.total += c[i];
    }
    for (int64_t first = 0; first < N; first += TILE) {
        int n = N - first < TILE ? (int)(N - first) : TILE;
        int64_t *c = weight + first / TILE * step;
        if (!step) FN(weigh)(n, l + first, top, scale, c);
        for (int i = 0; i < n; i++) c[i] = sum += c[i];
        begin = take_tile(&points, s, first, n, c, begin, ancestors);
    }
}

CLONES void FN(resample)(int64_t begin, int64_t end, void *parameters) {
    const Resample *p = parameters;
    const int64_t N = p->N, M = p->M;
    const bool is_ordered = p->scheme == STRATIFIED || p->scheme == SYSTEMATIC;
    const Row row = row_in(p, p->scratch + (is_ordered ? 0 : begin * RESAMPLE_SCRATCH(N)));
    for (int64_t b = begin * p->B / p->chunks; b < end * p->B / p->chunks; b++) {
        const REAL *l = (const REAL *)p->log_weights + b * N;
        int64_t *ancestors = p->ancestors + b * M;
        Source s = source_of_row(p->seed, b);
        REAL top;
        bool good = FN(find_top)(N, l, &top);
        if (!good && p->scheme != MULTINOMIAL) {
            for (int64_t i = 0; i < M; i++) ancestors[i] = i * N / M;
            continue;
        }
        if (is_ordered) {
            FN(ordered)(p, s, l, top, ancestors);
            continue;
        }
        FN(accumulate)(N, l, good, top, row.cumulative);
        if (p->scheme == MULTINOMIAL) multinomial(&row, s, M, ancestors);
        else residual(&row, s, ancestors);
    }
}
#endif
