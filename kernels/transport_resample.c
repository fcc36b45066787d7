/* Sinkhorn's steps, particles as lanes. Contract, definition: transport_resample.h; a row's coordinates: transport_row.h.
 *
 * Both sums of a step, S over columns and R over rows, come from one exp2 a pair: with f and g inside, the entries are the
 * plan's, so that near the fixed point all sums are near 1 and need no maximum. Where a sum says that this failed (e fell
 * steeply), the row's step is done again with maxima, in double.
 */
#ifndef REAL
#include "transport_resample.h"
#define MDPS_FILE "transport_resample.c"
#include "for_each_real.h"
#else
#include "transport_row.h"

/* S and N R at e = log2(e) / unit. R has room for TRANSPORT_LANES parts of each. */
INLINE void FN(add_up)(const FN(Row) *row, REAL unit, int K, REAL *S, REAL *R) {
    for (int64_t i0 = 0; i0 < row->padded; i0 += TRANSPORT_TILE) {
        REAL f[TRANSPORT_TILE] __attribute__((aligned(64))), entry[TRANSPORT_TILE] __attribute__((aligned(64)));
        REAL sum[TRANSPORT_TILE] __attribute__((aligned(64))) = {0};
        FN(load_tile)(row, unit, i0, f);
        for (int64_t j = 0; j < row->N; j++) {
            FN(entries)(row, unit, f, i0, j, K, entry);
            for (int l = 0; l < TRANSPORT_TILE; l++) sum[l] += row->w[j] * entry[l];
            FN(add_lanes)(entry, i0, j, R);
        }
        memcpy(S + i0, sum, sizeof sum);
    }
    FN(sum_lanes)(row->N, R);
}

/* log2 of S_i (by_rows) or N R_j, with the largest exponent taken out. */
static double FN(log_sum)(const FN(Row) *row, double unit, int64_t item, bool by_rows) {
    double top = -INFINITY, sum = 0;
    for (int again = 0; again < 2; again++)
        for (int64_t n = 0; n < row->N; n++) {
            const int64_t i = by_rows ? item : n, j = by_rows ? n : item;
            double square = 0;
            for (int k = 0; k < row->K; k++) {
                double away = row->x[k * row->padded + i] - row->x[k * row->padded + j];
                square += away * away;
            }
            double a = ((double)row->f[i] + row->g[j] - 0.5 * square) * unit + (by_rows ? log2((double)row->w[j]) : 0);
            if (again) sum += exp2_real_f64(a - top);
            else top = a > top ? a : top;
        }
    return top + log2(sum);
}

static void FN(log_sums)(const FN(Row) *row, REAL unit, REAL *S, REAL *R) {
    for (int64_t n = 0; n < row->N; n++) {
        S[n] = (REAL)FN(log_sum)(row, unit, n, true);
        R[n] = (REAL)FN(log_sum)(row, unit, n, false);
    }
}

/* The natural logarithms of S and R in their place; returns the largest size of one. */
INLINE REAL FN(take_logs)(const FN(Row) *row, REAL unit, REAL *S, REAL *R) {
    REAL low = 1, high = 1, most = 0;
    for (int64_t n = 0; n < row->N; n++) {
        REAL least = S[n] < R[n] ? S[n] : R[n], largest = S[n] < R[n] ? R[n] : S[n];
        low = least < low ? least : low;
        high = largest > high ? largest : high;
    }
    if (low < 1 / TRANSPORT_FAR || high > TRANSPORT_FAR) FN(log_sums)(row, unit, S, R);
    else
        for (int64_t n = 0; n < row->N; n++) S[n] = FN(log2_less)(S[n], 0), R[n] = FN(log2_less)(R[n], 0);
    const REAL log_N = log((REAL)row->N);
    for (int64_t n = 0; n < row->N; n++) {
        S[n] *= (REAL)LN2;
        R[n] = R[n] * (REAL)LN2 - log_N;
        REAL size = fabs(S[n]) > fabs(R[n]) ? fabs(S[n]) : fabs(R[n]);
        most = size > most ? size : most;
    }
    return most;
}

/* Moves f and g to the fixed point; returns the number of steps. */
INLINE int64_t FN(solve)(const TransportResample *p, FN(Row) *row, int K, REAL *S, REAL *R) {
    const double first = row->range * row->range;
    double e = first > p->epsilon ? first : p->epsilon;
    int64_t steps = 0;
    for (bool last = false; !last;) {
        FN(add_up)(row, (REAL)(LOG2E / e), K, S, R);
        const REAL share = (REAL)(steps++ ? 0.5 * e : e), most = share * FN(take_logs)(row, (REAL)(LOG2E / e), S, R);
        last = steps >= p->max_iterations || (e == p->epsilon && most <= p->threshold);
        if (last && e == p->epsilon) break;
        for (int64_t n = 0; n < row->N; n++) row->f[n] -= share * S[n], row->g[n] -= share * R[n];
        e = e * p->scaling * p->scaling;
        e = e > p->epsilon && !last ? e : p->epsilon;
        if (last) {
            FN(add_up)(row, (REAL)(LOG2E / e), K, S, R);
            FN(take_logs)(row, (REAL)(LOG2E / e), S, R);
        }
    }
    for (int64_t n = 0; n < row->N; n++) row->f[n] -= (REAL)p->epsilon * S[n];
    return steps;
}

/* mean[k] = sum_j T_ij x_j; R as in add_up. */
INLINE void FN(apply_plan)(const FN(Row) *row, REAL unit, int K, REAL *mean, REAL *R) {
    for (int64_t i0 = 0; i0 < row->padded; i0 += TRANSPORT_TILE) {
        REAL f[TRANSPORT_TILE] __attribute__((aligned(64))), entry[TRANSPORT_TILE] __attribute__((aligned(64)));
        REAL sum[TRANSPORT_TILE] __attribute__((aligned(64))) = {0};
        FN(load_tile)(row, unit, i0, f);
        for (int k = 0; k < K; k++)
            for (int l = 0; l < TRANSPORT_TILE; l++) mean[k * row->padded + i0 + l] = 0;
        for (int64_t j = 0; j < row->N; j++) {
            FN(entries)(row, unit, f, i0, j, K, entry);
            FN(add_lanes)(entry, i0, j, R);
            for (int l = 0; l < TRANSPORT_TILE; l++) sum[l] += entry[l] *= row->w[j];
#pragma GCC unroll 4
            for (int k = 0; k < K; k++) {
                REAL *out = mean + k * row->padded + i0, xj = row->x[k * row->padded + j];
                for (int l = 0; l < TRANSPORT_TILE; l++) out[l] += entry[l] * xj;
            }
        }
        for (int k = 0; k < K; k++)
            for (int l = 0; l < TRANSPORT_TILE; l++) mean[k * row->padded + i0 + l] /= sum[l];
    }
    FN(sum_lanes)(row->N, R);
}

/* From scaled coordinates to particles. */
INLINE void FN(store_particles)(const TransportResample *p, const FN(Row) *row, const REAL *mean, REAL *out) {
    const int D = p->G + p->A;
    for (int64_t n = 0; n < p->N; n++) {
        for (int g = 0; g < p->G; g++) out[n * D + g] = (REAL)(row->scale * mean[g * row->padded + n] + row->centre[g]);
        for (int c = p->G; c < D; c++) {
            REAL cosine = (REAL)(row->scale * mean[c * row->padded + n] + row->centre[c]);
            REAL sine = (REAL)(row->scale * mean[(c + p->A) * row->padded + n] + row->centre[c + p->A]);
            out[n * D + c] = FN(wrap)(atan2(sine, cosine));
        }
    }
}

INLINE void FN(transport_row)(const TransportResample *p, int64_t b, FN(Row) *row, int K) {
    const int64_t N = p->N;
    REAL *S = row->g + row->padded, *R = S + row->padded, *mean = R + TRANSPORT_LANES * row->padded;
    REAL error = 0, *potentials = (REAL *)p->potentials + 2 * b * N;
    p->iterations[b] = FN(solve)(p, row, K, S, R);
    FN(apply_plan)(row, (REAL)(LOG2E / p->epsilon), K, mean, R);
#pragma omp simd reduction(+ : error)
    for (int64_t n = 0; n < N; n++) error += row->w[n] * fabs(R[n] / N - 1);
    ((REAL *)p->marginal_error)[b] = error;
    FN(store_particles)(p, row, mean, (REAL *)p->transported + b * N * (p->G + p->A));
    memcpy(potentials, row->f, N * sizeof(REAL));
    memcpy(potentials + N, row->g, N * sizeof(REAL));
}

/* A row that has no plan. */
static void FN(fill_nan)(const TransportResample *p, int64_t b) {
    const int64_t N = p->N, D = p->G + p->A;
    for (int64_t n = 0; n < N * D; n++) ((REAL *)p->transported)[b * N * D + n] = NAN;
    for (int64_t n = 0; n < 2 * N; n++) ((REAL *)p->potentials)[2 * b * N + n] = NAN;
    ((REAL *)p->marginal_error)[b] = NAN;
    p->iterations[b] = 0;
}

CLONES void FN(transport_resample)(int64_t begin, int64_t end, void *parameters) {
    const TransportResample *p = parameters;
    for (int64_t b = begin; b < end; b++) {
        FN(Row) row;
        if (!FN(load_row)(p, b, (REAL *)p->scratch + b * transport_scratch(p, false), &row)) FN(fill_nan)(p, b);
        else if (row.K == 4) FN(transport_row)(p, b, &row, 4);
        else if (row.K == 2) FN(transport_row)(p, b, &row, 2);
        else FN(transport_row)(p, b, &row, row.K);
    }
}
#endif
