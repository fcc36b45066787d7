/* What a row of a batch of mixtures needs before its pairs. Contract: mixture_log_prob.h. */
#ifndef REAL
#include "bessel.h"
#include "mixture_log_prob.h"
#define MDPS_FILE "mixture_prepare.c"
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

/* Whether one of n states is not finite or farther than `most` from the centre, in scaled linear coordinates. Numbers are taken
 * as they lie in memory, LANES states at a time; `centre` and `scale` are those of LANES states. */
INLINE int FN(any_far_of)(const REAL *x, int n, const REAL *centre, const REAL *scale, REAL most) {
    int far = 0;
#pragma omp simd reduction(| : far)
    for (int l = 0; l < n; l++) far |= !(fabs(x[l] - centre[l]) * scale[l] <= most);
    return far;
}
INLINE int FN(any_far)(const REAL *x, int64_t n, int D, const REAL *centre, const REAL *scale, REAL most) {
    int far = 0;
    for (; n >= LANES; n -= LANES, x += LANES * D) far |= FN(any_far_of)(x, LANES * D, centre, scale, most);
    return far | FN(any_far_of)(x, (int)n * D, centre, scale, most);
}

INLINE void FN(widen)(const REAL *x, int n, REAL *low, REAL *high) {
#pragma omp simd
    for (int l = 0; l < n; l++) {
        low[l] = x[l] < low[l] ? x[l] : low[l];
        high[l] = x[l] > high[l] ? x[l] : high[l];
    }
}
/* The middle of the means' range in each dimension, LANES times over. */
INLINE void FN(centre_of)(const REAL *means, int64_t N, int D, REAL *centre) {
    REAL low[MIXTURE_MAX_D * LANES], high[MIXTURE_MAX_D * LANES];
    for (int l = 0; l < LANES; l++)
        for (int d = 0; d < D; d++) low[l * D + d] = high[l * D + d] = means[d];
    for (; N >= LANES; N -= LANES, means += LANES * D) FN(widen)(means, LANES * D, low, high);
    FN(widen)(means, (int)N * D, low, high);
    for (int l = 1; l < LANES; l++)
        for (int d = 0; d < D; d++) {
            low[d] = low[l * D + d] < low[d] ? low[l * D + d] : low[d];
            high[d] = high[l * D + d] > high[d] ? high[l * D + d] : high[d];
        }
    for (int l = 0; l < LANES; l++)
        for (int d = 0; d < D; d++) centre[l * D + d] = (REAL)(0.5 * ((double)low[d] + (double)high[d]));
}

/* Components as structure of arrays: log2 of the relative weight, scaled means, then r cos(mu/2) and r sin(mu/2). */
INLINE void FN(prepare_components)(const MixtureLogProb *p, int64_t b, int G, int A, const MixtureRow *row, REAL *out) {
    const int D = G + A;
    const int64_t N = p->N, stride = mixture_padded(N);
    const REAL *means = (const REAL *)p->means + b * N * D, *weights = (const REAL *)p->log_weights + b * N;
    const REAL top = (REAL)row->top;
    for (int64_t j = 0; j < N; j++) out[j] = weights[j] == -INFINITY ? weights[j] : (weights[j] - top) * (REAL)LOG2E;
    for (int64_t j = N; j < stride; j++) out[j] = -INFINITY;
    for (int g = 0; g < G; g++) {
        REAL centre = (REAL)row->centre[g], scale = (REAL)row->scale[g], *scaled = out + (1 + g) * stride;
        for (int64_t j = 0; j < N; j++) scaled[j] = (means[j * D + g] - centre) * scale;
        for (int64_t j = N; j < stride; j++) scaled[j] = 0;
    }
    for (int k = 0; k < A; k++) {
        REAL *kc = out + (1 + G + k) * stride, *ks = kc + A * stride, r = (REAL)row->scale[G + k];
        for (int64_t j = 0; j < N; j++) kc[j] = means[j * D + G + k];
        for (int64_t j = N; j < stride; j++) kc[j] = 0;
        for (int64_t j = 0; j < stride; j++) {
            REAL u = FN(turns)(kc[j]), v = u * u;
            ks[j] = r * (u * FN(sinpi_over)(v));
            kc[j] = r * FN(cospi_poly)(v);
        }
    }
}

/* Centre and top of a row; whether it is computed exactly: some scaled coordinate is beyond what REAL holds well, or not
 * finite. */
INLINE void FN(prepare_row)(const MixtureLogProb *p, int64_t b, int G, int A, MixtureRow *row, REAL *components) {
    const int D = G + A;
    const REAL *means = (const REAL *)p->means + b * p->N * D, *x = (const REAL *)p->x + b * p->M * D;
    const REAL *weights = (const REAL *)p->log_weights + b * p->N;
    const REAL most = IS_DOUBLE ? (REAL)0x1p40 : 1024;
    REAL top = -INFINITY, centre[MIXTURE_MAX_D * LANES] = {0}, scale[MIXTURE_MAX_D * LANES];
    if (p->N) FN(centre_of)(means, p->N, D, centre);
    for (int l = 0; l < LANES; l++)
        for (int d = 0; d < D; d++) scale[l * D + d] = d < G ? (REAL)row->scale[d] : 0;
    for (int d = 0; d < D; d++) row->centre[d] = centre[d];
    int beyond = FN(any_far)(x, p->M, D, centre, scale, most) | FN(any_far)(means, p->N, D, centre, scale, most);
    for (int d = G; d < D; d++) beyond |= !(row->scale[d] <= most);
#pragma omp simd reduction(| : beyond) reduction(max : top)
    for (int64_t j = 0; j < p->N; j++) {
        beyond |= !(weights[j] < INFINITY);
        top = weights[j] > top ? weights[j] : top;
    }
    row->top = top;
    row->exactly = beyond;
    if (!beyond) FN(prepare_components)(p, b, G, A, row, components);
}

CLONES void FN(mixture_prepare_row)(const MixtureLogProb *p, int64_t b, bool same, MixtureRow *row, void *components) {
    if (!same) FN(prepare_kernel)(p, b, row);
    row->exactly = p->M < MIXTURE_FEW_QUERIES;
    if (row->exactly) return;
    if (p->G == 2 && p->A == 1) FN(prepare_row)(p, b, 2, 1, row, components);
    else FN(prepare_row)(p, b, p->G, p->A, row, components);
}

void FN(mixture_prepare)(int64_t begin, int64_t end, void *parameters) {
    const MixtureLogProb *p = parameters;
    const int64_t size = mixture_padded(p->N) * (1 + mixture_features(p));
    for (int64_t b = begin; b < end; b++) {
        bool same = b > begin && !p->bandwidth_stride;
        if (same) p->rows[b] = p->rows[b - 1];
        FN(mixture_prepare_row)(p, b, same, p->rows + b, (REAL *)p->components + b * size);
    }
}
#endif
