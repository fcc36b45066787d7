/* Log-density of mixtures, forward. Contract: mixture_log_prob.h, mathematics: mixture_row.h.
 *
 * The tile loop keeps 64 sums in registers and walks the components; written step by step over the lanes, so that gcc
 * interleaves the independent chains. Shifting by the largest weight (kernels are at most 1) saves the pass, or the rescaling,
 * that a running maximum costs: 10-15 % measured; the few queries that this bound fails go one by one through exact_sum.
 */
#ifndef REAL
#include "mixture_log_prob.h"
#include <stdbool.h>
#define MDPS_FILE "mixture_log_prob.c"
#include "for_each_real.h"
#else
#include "mixture_row.h"

/* sum[lane of K groups] += 2^(a + BIAS), J components at a time. */
INLINE void FN(sum_groups)(const REAL *q, int64_t size, const REAL *components, int64_t N, int64_t stride, int J, int K, int G,
                       int A, REAL *sum) {
    double total[PAIRS] __attribute__((aligned(64))) = {0};
    for (int64_t first = 0; first < N; first += MIXTURE_SUMMED) {
        const int64_t last = N - first < MIXTURE_SUMMED ? N : first + MIXTURE_SUMMED;
        REAL s[PAIRS] __attribute__((aligned(64))) = {0};
        for (int64_t n = first; n < last; n += J) {
            REAL a[PAIRS] __attribute__((aligned(64)));
            FN(exponents)(q, size, components + n, stride, J, K, G, A, a, 0, 0);
            EACH_PAIR(1, 4) s[at + l] += FN(exp2_biased)(a[at + l], MIXTURE_LEAST, MIXTURE_BIAS);
        }
        EACH_PAIR(1, 4) total[at + l] += s[at + l];
    }
    for (int l = 0; l < K * LANES; l++) sum[l] = 0;
    EACH_PAIR(J, K) sum[k * LANES + l] += (REAL)total[at + l];
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
FN(tile)(const MixtureLogProb *p, int64_t b, int64_t i0, int n, const MixtureRow *row, const REAL *components, int G,
                 int A) {
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

/* Tiles of rows that are prepared, or of short rows, the tiles of a row together. */
INLINE void FN(tiles)(const MixtureLogProb *p, int64_t begin, int64_t end, int G, int A) {
    const bool is_short = mixture_is_short(p);
    const int64_t n_tiles = mixture_tiles(p), size = mixture_padded(p->N) * (1 + G + 2 * A);
    MixtureRow own;
    REAL own_components[(1 + 2 * MIXTURE_MAX_D) * MIXTURE_SHORT] __attribute__((aligned(64)));
    if (is_short) begin *= n_tiles, end *= n_tiles;
    for (int64_t item = begin; item < end; item++) {
        const int64_t b = item / n_tiles, i0 = item % n_tiles * MIXTURE_TILE;
        if (is_short && i0 == 0) FN(mixture_prepare_row)(p, b, item > begin && !p->bandwidth_stride, &own, own_components);
        FN(tile)(p, b, i0, p->M - i0 < MIXTURE_TILE ? (int)(p->M - i0) : MIXTURE_TILE, is_short ? &own : p->rows + b,
             is_short ? own_components : (const REAL *)p->components + b * size, G, A);
    }
}

CLONES void FN(mixture_log_prob)(int64_t begin, int64_t end, void *parameters) {
    const MixtureLogProb *p = parameters;
    if (p->G == 2 && p->A == 1) FN(tiles)(p, begin, end, 2, 1);
    else if (!IS_DOUBLE && p->G == 2 && p->A == 0) FN(tiles)(p, begin, end, 2, 0);
    else if (!IS_DOUBLE && p->G == 3 && p->A == 0) FN(tiles)(p, begin, end, 3, 0);
    else FN(tiles)(p, begin, end, p->G, p->A);
}
#endif
