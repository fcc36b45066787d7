/* Log-density of mixtures, forward. Contract: mixture_log_prob.h, mathematics: mixture_row.h.
 *
 * The tile loop keeps 64 sums in registers and walks the components; written step by step over the lanes, so that gcc
 * interleaves the independent chains. Shifting by the largest weight (kernels are at most 1) saves the pass, or the rescaling,
 * that a running maximum costs: 10-15 % measured; the few queries that this bound fails go one by one through exact_sum.
 */
#ifndef REAL
#include "bessel.h"
#include "mixture_log_prob.h"
#include <stdbool.h>
#define MDPS_FILE "mixture_log_prob.c"
#include "for_each_real.h"
#else
#include "mixture_prepare.h"

int64_t FN(mixture_bad_bandwidth)(const MixtureLogProb *p) {
    const REAL *bandwidths = p->bandwidths;
    const int D = p->G + p->A;
    for (int64_t i = 0; i < (p->bandwidth_stride ? p->B : 1) * D; i++)
        if (!(bandwidths[i] > 0 && bandwidths[i] < INFINITY)) return i / D;
    return -1;
}

/* The row's components in the scratch memory of all rows. */
INLINE REAL *FN(components_of)(const MixtureLogProb *p, int64_t b) {
    return (REAL *)p->components + b * mixture_padded(p->N) * (1 + mixture_features(p));
}

/* sum[lane of K groups] += 2^(a + BIAS), J components at a time. */
INLINE void FN(sum_groups)(const REAL *q, int64_t size, const REAL *components, int64_t N, int64_t stride, int J, int K, int G,
                           int A, REAL *sum) {
    REAL s[PAIRS] __attribute__((aligned(64))) = {0};
    for (int64_t n = 0; n < N; n += J) {
        REAL a[PAIRS] __attribute__((aligned(64)));
        FN(exponents)(q, size, components + n, stride, MIXTURE_BIAS, J, K, G, A, a, 0, 0);
        EACH_PAIR(1, 4) s[at + l] += FN(exp2_from)(a[at + l], IS_DOUBLE ? -1022 : -126);
    }
    for (int l = 0; l < K * LANES; l++) sum[l] = 0;
    EACH_PAIR(J, K) sum[k * LANES + l] += s[at + l];
}

INLINE void FN(exact_query)(const MixtureLogProb *p, int64_t b, int64_t i, const MixtureRow *row, int G, int A) {
    FN(Block) block;
    double top, sum;
    FN(exact_sum)(p, b, row, (const REAL *)p->x + (b * p->M + i) * (G + A), G, A, &block, &top, &sum);
    ((REAL *)p->log_prob)[b * p->M + i] = (REAL)((top + log2(sum)) * LN2 + row->log_norm);
    ((REAL *)p->log2_sum)[b * p->M + i] = INFINITY;
}

/* Queries i0 .. i0 + n of row b, n <= 64. */
INLINE void
FN(tile)(const MixtureLogProb *p, int64_t b, int64_t i0, int n, const MixtureRow *row, const REAL *components, int G, int A) {
    const int64_t stride = mixture_padded(p->N), size = (G + 2 * A) * LANES;
    REAL q[2 * MIXTURE_MAX_D * MIXTURE_TILE] __attribute__((aligned(64))), sum[MIXTURE_TILE] __attribute__((aligned(64)));
    REAL *log_prob = (REAL *)p->log_prob + b * p->M + i0, *log2_sum = (REAL *)p->log2_sum + b * p->M + i0;
    REAL enough = (REAL)p->N * (REAL)MIXTURE_ENOUGH, offset = (REAL)(row->top + row->log_norm);
    int few = row->exactly;
    if (!row->exactly) {
        FN(load_queries)((const REAL *)p->x + (b * p->M + i0) * (G + A), n, row, G, A, q, size);
        if (n > 3 * LANES) FN(sum_groups)(q, size, components, p->N, stride, 1, 4, G, A, sum);
        else
            for (int k = 0; k * LANES < n; k++)
                FN(sum_groups)(q + k * size, size, components, p->N, stride, 4, 1, G, A, sum + k * LANES);
        for (int l = 0; l < n; l++) few |= !(sum[l] > enough);
        for (int l = 0; l < n; l++) {
            log2_sum[l] = FN(log2_less)(sum[l], MIXTURE_BIAS);
            log_prob[l] = log2_sum[l] * (REAL)LN2 + offset;
        }
    }
    for (int l = 0; l < n && few; l++)
        if (row->exactly || !(sum[l] > enough)) FN(exact_query)(p, b, i0 + l, row, G, A);
}

/* Whole rows, or tiles of rows that are prepared. */
INLINE void FN(forward)(const MixtureLogProb *p, int64_t begin, int64_t end, int G, int A) {
    const int64_t n_tiles = mixture_tiles(p);
    MixtureRow own = {0};
    REAL components[(1 + 2 * MIXTURE_MAX_D) * MIXTURE_SHORT] __attribute__((aligned(64)));
    for (int64_t item = begin; item < end; item++) {
        if (mixture_is_short(p)) {
            FN(prepare)(p, item, item > begin && !p->bandwidth_stride, G, A, &own, components);
            for (int64_t i0 = 0; i0 < p->M; i0 += MIXTURE_TILE)
                FN(tile)(p, item, i0, p->M - i0 < MIXTURE_TILE ? (int)(p->M - i0) : MIXTURE_TILE, &own, components, G, A);
        } else {
            int64_t b = item / n_tiles, i0 = item % n_tiles * MIXTURE_TILE;
            FN(tile)(p, b, i0, p->M - i0 < MIXTURE_TILE ? (int)(p->M - i0) : MIXTURE_TILE, p->rows + b,
                     FN(components_of)(p, b), G, A);
        }
    }
}

CLONES void FN(mixture_prepare)(int64_t begin, int64_t end, void *parameters) {
    const MixtureLogProb *p = parameters;
    for (int64_t b = begin; b < end; b++) {
        bool same = b > begin && !p->bandwidth_stride;
        if (same) p->rows[b] = p->rows[b - 1];
        FN(prepare)(p, b, same, p->G, p->A, p->rows + b, FN(components_of)(p, b));
    }
}

CLONES void FN(mixture_log_prob)(int64_t begin, int64_t end, void *parameters) {
    const MixtureLogProb *p = parameters;
    if (p->G == 2 && p->A == 1) FN(forward)(p, begin, end, 2, 1);
    else if (!IS_DOUBLE && p->G == 2 && p->A == 0) FN(forward)(p, begin, end, 2, 0);
    else if (!IS_DOUBLE && p->G == 3 && p->A == 0) FN(forward)(p, begin, end, 3, 0);
    else FN(forward)(p, begin, end, p->G, p->A);
}
#endif
