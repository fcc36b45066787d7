/* Gradient of transport_resample by implicit differentiation. Contract, formulas: transport_resample.h.
 *
 * The plan's entries E_ij = exp((f_i + g_j - C_ij) / epsilon) are computed once and kept: T_ij = w_j E_ij, Q_ij = v_j E_ij.
 * What conjugate gradients solve is (I - T Q') (lambda - m) = T (Q' m - n) with m_i = sum_j T_ij U_ij, n_j = sum_i Q_ij U_ij:
 * symmetric, since T Q' = E diag(w v) E', and singular along 1, where nothing depends on the solution.
 */
#ifndef REAL
#include "transport_resample.h"
#define MDPS_FILE "transport_resample_backward.c"
#include "for_each_real.h"
#else
#include "transport_row.h"

typedef struct {
    REAL *E;                                      /* (N, padded): row j has the entries of particle j */
    REAL *v, *m, *nu, *lambda, *residual, *p, *q; /* (padded) each; v has room for TRANSPORT_LANES parts */
    REAL *grad, *mean, *moved;                    /* (K, padded) each */
} FN(Solver);

/* Of the numbers of a tile: halves become lanes. */
INLINE double FN(sum_tile)(REAL *part) {
#pragma GCC unroll 8
    for (int left = TRANSPORT_TILE / 2; left >= 4; left /= 2)
        for (int l = 0; l < left; l++) part[l] += part[l + left];
    return ((double)part[0] + part[1]) + ((double)part[2] + part[3]);
}

INLINE double FN(dot)(int64_t n, const REAL *x, const REAL *y) {
    REAL part[TRANSPORT_TILE] __attribute__((aligned(64))) = {0};
    for (int64_t i = 0; i < n; i += TRANSPORT_TILE)
        for (int l = 0; l < TRANSPORT_TILE; l++) part[l] += x[i + l] * y[i + l];
    return FN(sum_tile)(part);
}

INLINE void FN(add)(int64_t n, REAL factor, const REAL *x, REAL *y) {
    for (int64_t i = 0; i < n; i++) y[i] += factor * x[i];
}

/* E, v, and mean = sum_j T_ij x_j. */
INLINE void FN(make_plan)(const TransportResample *p, const FN(Row) *row, int K, FN(Solver) *s) {
    const REAL unit = (REAL)(LOG2E / p->epsilon);
    const int64_t padded = row->padded;
    for (int64_t i0 = 0; i0 < padded; i0 += TRANSPORT_TILE) {
        REAL f[TRANSPORT_TILE] __attribute__((aligned(64)));
        FN(load_tile)(row, unit, i0, f);
        for (int64_t j = 0; j < row->N; j++) {
            FN(entries)(row, unit, f, i0, j, K, s->E + j * padded + i0);
            FN(add_lanes)(s->E + j * padded + i0, i0, j, s->v);
        }
    }
    FN(sum_lanes)(row->N, s->v);
    memset(s->mean, 0, K * padded * sizeof(REAL));
    for (int64_t j = 0; j < row->N; j++) {
        s->v[j] = s->v[j] > 0 ? 1 / s->v[j] : 0;
        for (int k = 0; k < K; k++)
            FN(add)(padded, row->w[j] * row->x[k * padded + j], s->E + j * padded, s->mean + k * padded);
    }
}

/* The gradient with respect to the scaled mean coordinates; 0 beyond N. */
INLINE void FN(load_grad)(const TransportResample *p, int64_t b, const FN(Row) *row, FN(Solver) *s) {
    const int D = p->G + p->A;
    const int64_t N = p->N, padded = row->padded;
    const REAL *grad = (const REAL *)p->grad + b * N * D, vanishing = IS_DOUBLE ? 0x1p-96 : 0x1p-38;
    memset(s->grad, 0, row->K * padded * sizeof(REAL));
    for (int64_t n = 0; n < N; n++) {
        for (int g = 0; g < p->G; g++) s->grad[g * padded + n] = (REAL)row->scale * grad[n * D + g];
        for (int c = p->G; c < D; c++) {
            REAL cosine = (REAL)(row->scale * s->mean[c * padded + n] + row->centre[c]);
            REAL sine = (REAL)(row->scale * s->mean[(c + p->A) * padded + n] + row->centre[c + p->A]);
            REAL square = cosine * cosine + sine * sine;
            REAL turn = square > vanishing ? (REAL)row->scale * grad[n * D + c] / square : 0;
            s->grad[c * padded + n] = -sine * turn;
            s->grad[(c + p->A) * padded + n] = cosine * turn;
        }
    }
}

/* The part of x that sums to 0. */
INLINE void FN(project)(int64_t N, REAL *x) {
    double sum = 0;
    for (int64_t n = 0; n < N; n++) sum += x[n];
    for (int64_t n = 0; n < N; n++) x[n] -= (REAL)(sum / N);
}

/* y = (I - T Q') x. */
INLINE void FN(multiply)(const FN(Row) *row, const FN(Solver) *s, const REAL *x, REAL *y) {
    memcpy(y, x, row->padded * sizeof(REAL));
    for (int64_t j = 0; j < row->N; j++) {
        const REAL *E = s->E + j * row->padded;
        FN(add)(row->padded, -row->w[j] * s->v[j] * (REAL)FN(dot)(row->padded, E, x), E, y);
    }
}

/* moved = sum_i E_ij grad_i; m; nu = n - Q' m; residual = -T nu. */
INLINE void FN(prepare)(const FN(Row) *row, int K, FN(Solver) *s) {
    const int64_t padded = row->padded;
    memset(s->m, 0, padded * sizeof(REAL));
    memset(s->residual, 0, padded * sizeof(REAL));
    for (int k = 0; k < K; k++)
        for (int64_t i = 0; i < padded; i++) s->m[i] += s->grad[k * padded + i] * s->mean[k * padded + i];
    for (int64_t j = 0; j < row->N; j++) {
        const REAL *E = s->E + j * padded;
        REAL sum = -(REAL)FN(dot)(padded, E, s->m);
        for (int k = 0; k < K; k++) {
            s->moved[k * padded + j] = (REAL)FN(dot)(padded, E, s->grad + k * padded);
            sum += s->moved[k * padded + j] * row->x[k * padded + j];
        }
        s->nu[j] = s->v[j] * sum;
        FN(add)(padded, -row->w[j] * s->nu[j], E, s->residual);
    }
}

/* Conjugate gradients; then lambda and nu. */
INLINE void FN(solve)(const FN(Row) *row, FN(Solver) *s) {
    const int64_t padded = row->padded;
    const double precise = IS_DOUBLE ? 1e-28 : 1e-13;
    memset(s->lambda, 0, padded * sizeof(REAL));
    FN(project)(row->N, s->residual);
    memcpy(s->p, s->residual, padded * sizeof(REAL));
    double square = FN(dot)(padded, s->residual, s->residual), enough = precise * square;
    for (int64_t step = 0; step < row->N + TRANSPORT_MORE_STEPS && square > enough; step++) {
        FN(multiply)(row, s, s->p, s->q);
        double curvature = FN(dot)(padded, s->p, s->q), before = square;
        if (!(curvature > 0)) break;
        FN(add)(padded, (REAL)(square / curvature), s->p, s->lambda);
        FN(add)(padded, (REAL)(-square / curvature), s->q, s->residual);
        FN(project)(row->N, s->residual);
        square = FN(dot)(padded, s->residual, s->residual);
        for (int64_t i = 0; i < padded; i++) s->p[i] = s->residual[i] + (REAL)(square / before) * s->p[i];
    }
    for (int64_t j = 0; j < row->N; j++) s->nu[j] -= s->v[j] * (REAL)FN(dot)(padded, s->E + j * padded, s->lambda);
    FN(add)(padded, 1, s->m, s->lambda);
}

/* mean = what the cost's gradient adds to that of x, times -epsilon; moved becomes all of it; grad_log_weights before
 * normalisation. */
INLINE void FN(collect)(const FN(Row) *row, double epsilon, int K, FN(Solver) *s, REAL *grad_w) {
    const int64_t padded = row->padded;
    memset(s->mean, 0, K * padded * sizeof(REAL));
    for (int64_t j = 0; j < row->N; j++) {
        const REAL *E = s->E + j * padded, w = row->w[j];
        REAL *G = s->q;
        for (int64_t i = 0; i < padded; i++) G[i] = -s->lambda[i] - s->nu[j];
        for (int k = 0; k < K; k++) FN(add)(padded, row->x[k * padded + j], s->grad + k * padded, G);
        for (int64_t i = 0; i < padded; i++) G[i] *= w * E[i];
        REAL sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < padded; i++) sum += G[i];
        grad_w[j] = s->v[j] > 0 ? sum + s->nu[j] * w / s->v[j] : 0;
        for (int k = 0; k < K; k++) {
            const REAL *x = row->x + k * padded, at = x[j];
            REAL *out = s->mean + k * padded, back = 0;
#pragma omp simd reduction(+ : back)
            for (int64_t i = 0; i < padded; i++) {
                REAL pull = G[i] * (x[i] - at);
                out[i] += pull;
                back += pull;
            }
            out[j] -= back;
        }
    }
    for (int k = 0; k < K; k++)
        for (int64_t j = 0; j < row->N; j++) {
            const int64_t n = k * padded + j;
            s->mean[n] /= -(REAL)epsilon;
            s->moved[n] = row->w[j] * s->moved[n] + s->mean[n];
        }
}

/* From the gradient of x to that of particles, and from the one of log w to that of log_weights. */
INLINE void FN(store)(const TransportResample *p, int64_t b, const FN(Row) *row, const FN(Solver) *s) {
    const int D = p->G + p->A;
    const int64_t N = p->N, padded = row->padded;
    REAL *out = (REAL *)p->grad_particles + b * N * D, *grad_w = (REAL *)p->grad_log_weights + b * N;
    const REAL *particles = (const REAL *)p->particles + b * N * D;
    double of_scale = 0, sum = 0;
    for (int k = 0; k < row->K && row->widest >= 0; k++) of_scale -= FN(dot)(padded, s->mean + k * padded, row->x + k * padded);
    for (int64_t n = 0; n < N && row->widest >= 0; n++)
        s->moved[row->widest * padded + n] += (REAL)(of_scale * row->K / N) * row->x[row->widest * padded + n];
    for (int64_t n = 0; n < N; n++) {
        for (int g = 0; g < p->G; g++) out[n * D + g] = s->moved[g * padded + n] / (REAL)row->scale;
        for (int c = p->G; c < D; c++) {
            REAL angle = particles[n * D + c];
            out[n * D + c] =
                (cos(angle) * s->moved[(c + p->A) * padded + n] - sin(angle) * s->moved[c * padded + n]) / (REAL)row->scale;
        }
        sum += grad_w[n];
    }
    for (int64_t n = 0; n < N; n++) grad_w[n] = row->collapsed ? 0 : grad_w[n] - row->w[n] * (REAL)sum;
}

INLINE void FN(backward_row)(const TransportResample *p, int64_t b, FN(Row) *row, int K) {
    const int64_t padded = row->padded;
    const REAL *potentials = (const REAL *)p->potentials + 2 * b * p->N;
    REAL *at = row->g + padded;
    FN(Solver) s = {.m = at, .nu = at + padded, .lambda = at + 2 * padded, .residual = at + 3 * padded, .p = at + 4 * padded};
    s.q = s.p + padded, s.grad = s.q + padded, s.mean = s.grad + K * padded, s.moved = s.mean + K * padded;
    s.v = s.moved + K * padded, s.E = s.v + TRANSPORT_LANES * padded;
    memcpy(row->f, potentials, p->N * sizeof(REAL));
    memcpy(row->g, potentials + p->N, p->N * sizeof(REAL));
    FN(make_plan)(p, row, K, &s);
    FN(load_grad)(p, b, row, &s);
    FN(prepare)(row, K, &s);
    FN(solve)(row, &s);
    FN(collect)(row, p->epsilon, K, &s, (REAL *)p->grad_log_weights + b * p->N);
    FN(store)(p, b, row, &s);
}

CLONES void FN(transport_resample_backward)(int64_t begin, int64_t end, void *parameters) {
    const TransportResample *p = parameters;
    const int64_t N = p->N, D = p->G + p->A;
    for (int64_t slot = begin; slot < end; slot++)
        for (int64_t b = slot; b < p->B; b += p->slots) {
            FN(Row) row;
            if (!FN(load_row)(p, b, (REAL *)p->scratch + slot * transport_scratch(p, true), &row)) {
                for (int64_t n = 0; n < N * D; n++) ((REAL *)p->grad_particles)[b * N * D + n] = NAN;
                for (int64_t n = 0; n < N; n++) ((REAL *)p->grad_log_weights)[b * N + n] = NAN;
            } else if (row.K == 4) FN(backward_row)(p, b, &row, 4);
            else FN(backward_row)(p, b, &row, row.K);
        }
}
#endif
