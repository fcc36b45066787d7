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
#include "mixture_row.h"

int64_t FN(mixture_bad_bandwidth)(const MixtureLogProb *p) {
    const REAL *bandwidths = p->bandwidths;
    const int D = p->G + p->A;
    for (int64_t i = 0; i < (p->bandwidth_stride ? p->B : 1) * D; i++)
        if (!(bandwidths[i] > 0 && bandwidths[i] < INFINITY)) return i / D;
    return -1;
}

/* The largest distance from the centre along dimension g, of n states. */
INLINE REAL FN(reach)(const REAL *x, int64_t n, int D, int g, REAL centre) {
    REAL reach = 0;
    for (int64_t i = 0; i < n; i++) {
        REAL away = fabs(x[i * D + g] - centre);
        reach = away > reach ? away : reach;
    }
    return reach;
}

/* Whether some number is NaN or beyond the limit. */
INLINE bool FN(any_beyond)(const REAL *x, int64_t n, bool negative_too) {
    int beyond = 0;
    for (int64_t i = 0; i < n; i++) beyond |= !((negative_too ? fabs(x[i]) : x[i]) < INFINITY);
    return beyond;
}

/* What depends on the bandwidths alone. */
INLINE void FN(prepare_kernel)(const MixtureLogProb *p, int64_t b, MixtureRow *row) {
    const REAL *bandwidths = (const REAL *)p->bandwidths + b * p->bandwidth_stride;
    row->log_norm = 0;
    for (int g = 0; g < p->G; g++) {
        row->scale[g] = sqrt(0.5 * LOG2E) / bandwidths[g];
        row->log_norm -= log(bandwidths[g]) + 0.5 * log(2 * PI);
    }
    for (int g = p->G; g < p->G + p->A; g++) {
        double kappa = 1 / ((double)bandwidths[g] * bandwidths[g]);
        row->scale[g] = sqrt(2 * LOG2E * kappa);
        row->log_norm -= log(2 * PI) + log_i0_scaled(kappa);
    }
}

/* Centre and top of a row; whether it is computed exactly: some scaled coordinate is beyond what REAL holds well, or not
 * finite. */
INLINE void FN(prepare_row)(const MixtureLogProb *p, int64_t b, MixtureRow *row) {
    const int D = p->G + p->A;
    const REAL *means = (const REAL *)p->means + b * p->N * D, *x = (const REAL *)p->x + b * p->M * D;
    const REAL *weights = (const REAL *)p->log_weights + b * p->N;
    double most = 0;
    REAL top = -INFINITY;
    for (int g = 0; g < p->G; g++) {
        REAL low = INFINITY, high = -INFINITY;
        for (int64_t j = 0; j < p->N; j++) {
            low = means[j * D + g] < low ? means[j * D + g] : low;
            high = means[j * D + g] > high ? means[j * D + g] : high;
        }
        row->centre[g] = p->N ? 0.5 * ((double)low + (double)high) : 0;
        REAL reach = FN(reach)(x, p->M, D, g, (REAL)row->centre[g]);
        double farthest = reach > high - row->centre[g] ? reach : high - row->centre[g];
        most = most > farthest * row->scale[g] ? most : farthest * row->scale[g];
    }
    for (int g = p->G; g < D; g++) most = most > row->scale[g] ? most : row->scale[g];
    for (int64_t j = 0; j < p->N; j++) top = weights[j] > top ? weights[j] : top;
    row->top = top;
    row->exactly = most > (IS_DOUBLE ? 0x1p40 : 1024) || FN(any_beyond)(x, p->M * D, true) ||
                   FN(any_beyond)(means, p->N * D, true) || FN(any_beyond)(weights, p->N, false);
}

/* Components as structure of arrays: log2 of the relative weight, scaled means, then r cos(mu/2) and r sin(mu/2). */
INLINE void FN(prepare_components)(const MixtureLogProb *p, int64_t b, const MixtureRow *row) {
    const int D = p->G + p->A;
    const int64_t N = p->N, stride = mixture_padded(N);
    const REAL *means = (const REAL *)p->means + b * N * D, *weights = (const REAL *)p->log_weights + b * N;
    REAL *out = (REAL *)p->components + b * stride * (1 + mixture_features(p)), top = (REAL)row->top;
    for (int64_t j = 0; j < N; j++) out[j] = weights[j] == -INFINITY ? weights[j] : (weights[j] - top) * (REAL)LOG2E;
    for (int64_t j = N; j < stride; j++) out[j] = -INFINITY;
    for (int g = 0; g < p->G; g++) {
        REAL centre = (REAL)row->centre[g], scale = (REAL)row->scale[g], *scaled = out + (1 + g) * stride;
        for (int64_t j = 0; j < N; j++) scaled[j] = (means[j * D + g] - centre) * scale;
        for (int64_t j = N; j < stride; j++) scaled[j] = 0;
    }
    for (int k = 0; k < p->A; k++) {
        REAL *kc = out + (1 + p->G + k) * stride, *ks = kc + p->A * stride, r = (REAL)row->scale[p->G + k];
        for (int64_t j = 0; j < N; j++) kc[j] = means[j * D + p->G + k];
        for (int64_t j = N; j < stride; j++) kc[j] = 0;
        for (int64_t j = 0; j < stride; j++) {
            REAL u = FN(turns)(kc[j]), v = u * u;
            ks[j] = r * (u * FN(sinpi_over)(v));
            kc[j] = r * FN(cospi_poly)(v);
        }
    }
}

CLONES void FN(mixture_prepare)(int64_t begin, int64_t end, void *parameters) {
    const MixtureLogProb *p = parameters;
    for (int64_t b = begin; b < end; b++) {
        MixtureRow *row = p->rows + b;
        if (b == begin || p->bandwidth_stride) FN(prepare_kernel)(p, b, row);
        else *row = p->rows[b - 1];
        row->exactly = p->M < MIXTURE_FEW_QUERIES;
        if (row->exactly) continue;
        FN(prepare_row)(p, b, row);
        if (!row->exactly) FN(prepare_components)(p, b, row);
    }
}

/* Sums of a tile: sum[l] += 2^(a + BIAS). */
INLINE void FN(sum_tile)(const REAL *q, const REAL *components, int64_t N, int64_t stride, int G, int A, REAL *sum) {
    REAL s[MIXTURE_TILE] __attribute__((aligned(64))) = {0};
    for (int64_t j = 0; j < N; j++) {
        REAL a[MIXTURE_TILE] __attribute__((aligned(64)));
        FN(exponents)(q, components + j, stride, components[j] + MIXTURE_BIAS, G, A, a, 0, 0);
        for (int l = 0; l < MIXTURE_TILE; l++) s[l] += FN(exp2_from)(a[l], IS_DOUBLE ? -1022 : -126);
    }
    memcpy(sum, s, sizeof s);
}

INLINE void FN(exact_query)(const MixtureLogProb *p, int64_t b, int64_t i, int G, int A) {
    FN(Block) block;
    double top, sum;
    FN(exact_sum)(p, b, (const REAL *)p->x + (b * p->M + i) * (G + A), G, A, &block, &top, &sum);
    ((REAL *)p->log_prob)[b * p->M + i] = (REAL)((top + log2(sum)) * LN2 + p->rows[b].log_norm);
    ((REAL *)p->log2_sum)[b * p->M + i] = INFINITY;
}

INLINE void FN(tiles)(const MixtureLogProb *p, int64_t begin, int64_t end, int G, int A) {
    const int64_t n_tiles = mixture_tiles(p), stride = mixture_padded(p->N);
    REAL q[2 * MIXTURE_MAX_D * MIXTURE_TILE] __attribute__((aligned(64))), sum[MIXTURE_TILE] __attribute__((aligned(64)));
    for (int64_t item = begin; item < end; item++) {
        int64_t b = item / n_tiles, i0 = item % n_tiles * MIXTURE_TILE, n = p->M - i0 < MIXTURE_TILE ? p->M - i0 : MIXTURE_TILE;
        const MixtureRow *row = p->rows + b;
        REAL *log_prob = (REAL *)p->log_prob + b * p->M + i0, *log2_sum = (REAL *)p->log2_sum + b * p->M + i0;
        REAL enough = (REAL)p->N * (REAL)MIXTURE_ENOUGH, offset = (REAL)(row->top + row->log_norm);
        bool all_enough = !row->exactly;
        if (!row->exactly) {
            FN(load_queries)((const REAL *)p->x + (b * p->M + i0) * (G + A), n, row, G, A, q);
            FN(sum_tile)(q, (const REAL *)p->components + b * stride * (1 + G + 2 * A), p->N, stride, G, A, sum);
            for (int l = 0; l < n; l++) all_enough &= sum[l] > enough;
            for (int l = 0; l < MIXTURE_TILE; l++) q[l] = FN(log2_less)(sum[l], MIXTURE_BIAS);
            for (int l = 0; l < n; l++) log2_sum[l] = q[l], log_prob[l] = q[l] * (REAL)LN2 + offset;
        }
        for (int64_t l = 0; l < n && !all_enough; l++)
            if (row->exactly || !(sum[l] > enough)) FN(exact_query)(p, b, i0 + l, G, A);
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
