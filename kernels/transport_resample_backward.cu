/* Gradient of transport_resample on the GPU, a row a block. Contract, formulas: transport_resample.h; the steps are those of
 * transport_resample_backward.c, but nothing of size N x N is kept: a warp computes a row or a column of the plan whenever it
 * needs one, which its exp2 makes cheaper than reading it.
 * This file includes itself once for float and once for double (for_each_real.h). */
#ifndef REAL
#include "transport_resample.h"

#include "cuda_block.cuh"
#define MDPS_FILE "transport_resample_backward.cu"
#include "for_each_real.h"

int transport_resample_backward_cuda(const void *parameters, int64_t, int is_double, void *stream) {
    const TransportResample *p = (const TransportResample *)parameters;
    return is_double ? launch_backward_f64(*p, stream) : launch_backward_f32(*p, stream);
}
#else
#include "real_math.h"

#include "transport_row.cuh"

typedef struct {
    FN(Row) row;
    REAL unit;
    REAL *v, *m, *nu, *lambda, *residual, *p, *q; /* (N) each, as in transport_resample_backward.c */
    REAL *grad, *mean, *moved;                    /* (K, N) each */
} FN(Solver);

/* Sum over n of value(n) times the entry of row i (column n) or, not by_rows, of column i (row n). A warp's. */
template <int STATIC_K, typename F> DEVICE REAL FN(sum_entries)(const FN(Solver) &s, bool by_rows, int64_t i, F value) {
    REAL sum = 0;
    for (int64_t n = lane_of_warp(); n < s.row.N; n += WARP)
        sum += value(n) * FN(entry)<STATIC_K>(s.row, s.unit, by_rows ? i : n, by_rows ? n : i);
    return reduce_warp(sum, Add());
}

/* out[k][i] = that sum for every coordinate, of value(k, n), AT_ONCE of them a pass. */
template <int STATIC_K, typename F> DEVICE void FN(sum_coordinates)(const FN(Solver) &s, bool by_rows, int64_t i, F value, REAL *out) {
    const int64_t N = s.row.N;
    for (int k0 = 0; k0 < s.row.K; k0 += AT_ONCE) {
        REAL sum[AT_ONCE] = {};
        for (int64_t n = lane_of_warp(); n < N; n += WARP) {
            const REAL entry = FN(entry)<STATIC_K>(s.row, s.unit, by_rows ? i : n, by_rows ? n : i);
#pragma unroll
            for (int c = 0; c < AT_ONCE; c++)
                if (k0 + c < s.row.K) sum[c] += entry * value(k0 + c, n);
        }
#pragma unroll
        for (int c = 0; c < AT_ONCE; c++) {
            if (k0 + c >= s.row.K) continue;
            REAL total = reduce_warp(sum[c], Add());
            if (lane_of_warp() == 0) out[(k0 + c) * N + i] = total;
        }
    }
}

/* x = f(n) for all n. */
template <typename F> DEVICE void FN(fill)(int64_t N, REAL *x, F f) {
    for_each_thread(N, [&](int64_t n) { x[n] = f(n); });
    __syncthreads();
}
DEVICE double FN(dot)(int64_t N, const REAL *x, const REAL *y) {
    double sum = 0;
    for_each_thread(N, [&](int64_t n) { sum += (double)x[n] * y[n]; });
    return sum_block(sum);
}

/* The gradient with respect to the scaled mean coordinates, and m. */
DEVICE void FN(load_grad)(const TransportResample &p, int64_t b, FN(Solver) &s) {
    const int64_t N = p.N, D = p.G + p.A;
    const double *centre = shared_memory<Common>()->centre;
    const REAL *grad = (const REAL *)p.grad + b * N * D, vanishing = IS_DOUBLE ? (REAL)0x1p-96 : (REAL)0x1p-38f;
    const REAL scale = (REAL)s.row.scale;
    for_each_thread(N, [&](int64_t n) {
        for (int g = 0; g < p.G; g++) s.grad[g * N + n] = scale * grad[n * D + g];
        for (int c = p.G; c < D; c++) {
            REAL cosine = (REAL)(s.row.scale * s.mean[c * N + n] + centre[c]);
            REAL sine = (REAL)(s.row.scale * s.mean[(c + p.A) * N + n] + centre[c + p.A]);
            REAL square = cosine * cosine + sine * sine;
            REAL turn = square > vanishing ? scale * grad[n * D + c] / square : 0;
            s.grad[c * N + n] = -sine * turn;
            s.grad[(c + p.A) * N + n] = cosine * turn;
        }
        REAL m = 0;
        for (int k = 0; k < s.row.K; k++) m += s.grad[k * N + n] * s.mean[k * N + n];
        s.m[n] = m;
    });
    __syncthreads();
}

/* v, mean, grad, m; moved and nu; the residual of lambda = m. */
template <int STATIC_K> DEVICE void FN(prepare)(const TransportResample &p, int64_t b, FN(Solver) &s) {
    const FN(Row) &row = s.row;
    const int64_t N = row.N;
    for_each_warp(N, [&](int64_t n) {
        const REAL sum = FN(sum_entries)<STATIC_K>(s, false, n, [](int64_t) { return (REAL)1; });
        if (lane_of_warp() == 0) s.v[n] = sum > 0 ? 1 / sum : 0;
        FN(sum_coordinates)<STATIC_K>(s, true, n, [&](int k, int64_t j) { return row.w[j] * row.x[k * N + j]; }, s.mean);
    });
    __syncthreads();
    FN(load_grad)(p, b, s);
    for_each_warp(N, [&](int64_t j) {
        FN(sum_coordinates)<STATIC_K>(s, false, j, [&](int k, int64_t i) { return s.grad[k * N + i]; }, s.moved);
        const REAL sum = FN(sum_entries)<STATIC_K>(s, false, j, [&](int64_t i) {
            REAL U = -s.m[i];
            for (int k = 0; k < row.K; k++) U += s.grad[k * N + i] * row.x[k * N + j];
            return U;
        });
        if (lane_of_warp() == 0) s.nu[j] = s.v[j] * sum;
    });
    __syncthreads();
    for_each_warp(N, [&](int64_t i) {
        const REAL sum = FN(sum_entries)<STATIC_K>(s, true, i, [&](int64_t j) { return row.w[j] * s.nu[j]; });
        if (lane_of_warp() == 0) s.residual[i] = -sum;
    });
    __syncthreads();
}

/* The part of x that sums to 0. */
DEVICE void FN(project)(int64_t N, REAL *x) {
    double sum = 0;
    for_each_thread(N, [&](int64_t n) { sum += x[n]; });
    const REAL mean = (REAL)(sum_block(sum) / N);
    FN(fill)(N, x, [&](int64_t n) { return x[n] - mean; });
}

/* q = (I - T Q') p; `moved` is not needed: t lies behind q. */
template <int STATIC_K> DEVICE void FN(multiply)(const FN(Solver) &s, REAL *t) {
    const FN(Row) &row = s.row;
    for_each_warp(row.N, [&](int64_t j) {
        const REAL sum = FN(sum_entries)<STATIC_K>(s, false, j, [&](int64_t i) { return s.p[i]; });
        if (lane_of_warp() == 0) t[j] = row.w[j] * s.v[j] * sum;
    });
    __syncthreads();
    for_each_warp(row.N, [&](int64_t i) {
        const REAL sum = FN(sum_entries)<STATIC_K>(s, true, i, [&](int64_t j) { return t[j]; });
        if (lane_of_warp() == 0) s.q[i] = s.p[i] - sum;
    });
    __syncthreads();
}

/* Conjugate gradients; then lambda and nu. */
template <int STATIC_K> DEVICE void FN(solve)(const FN(Solver) &s) {
    const int64_t N = s.row.N;
    FN(project)(N, s.residual);
    FN(fill)(N, s.lambda, [](int64_t) { return (REAL)0; });
    FN(fill)(N, s.p, [&](int64_t n) { return s.residual[n]; });
    double square = FN(dot)(N, s.residual, s.residual);
    const double enough = (IS_DOUBLE ? 1e-28 : 1e-13) * square;
    for (int64_t step = 0; step < N + TRANSPORT_MORE_STEPS && square > enough; step++) {
        FN(multiply)<STATIC_K>(s, s.mean);
        const double curvature = FN(dot)(N, s.p, s.q), before = square;
        if (!(curvature > 0)) break;
        const REAL length = (REAL)(square / curvature);
        FN(fill)(N, s.lambda, [&](int64_t n) { return s.lambda[n] + length * s.p[n]; });
        FN(fill)(N, s.residual, [&](int64_t n) { return s.residual[n] - length * s.q[n]; });
        FN(project)(N, s.residual);
        square = FN(dot)(N, s.residual, s.residual);
        FN(fill)(N, s.p, [&](int64_t n) { return s.residual[n] + (REAL)(square / before) * s.p[n]; });
    }
    for_each_warp(N, [&](int64_t j) {
        const REAL sum = FN(sum_entries)<STATIC_K>(s, false, j, [&](int64_t i) { return s.lambda[i]; });
        if (lane_of_warp() == 0) s.nu[j] -= s.v[j] * sum;
    });
    __syncthreads();
    FN(fill)(N, s.lambda, [&](int64_t n) { return s.lambda[n] + s.m[n]; });
}

/* What moves particle n as row and as column of the plan, into mean and q (the gradient of log w before normalisation). */
template <int STATIC_K> DEVICE void FN(collect)(const FN(Solver) &s, double epsilon, int64_t n) {
    const FN(Row) &row = s.row;
    const int64_t N = row.N;
    for (int k0 = 0; k0 < row.K; k0 += AT_ONCE) {
        REAL sum[AT_ONCE] = {}, of_column = 0;
        for (int64_t o = lane_of_warp(); o < N; o += WARP) {
            REAL as_row = -s.lambda[n] - s.nu[o], as_column = -s.lambda[o] - s.nu[n];
            for (int k = 0; k < row.K; k++) {
                as_row += s.grad[k * N + n] * row.x[k * N + o];
                as_column += s.grad[k * N + o] * row.x[k * N + n];
            }
            as_row *= row.w[o] * FN(entry)<STATIC_K>(row, s.unit, n, o);
            as_column *= row.w[n] * FN(entry)<STATIC_K>(row, s.unit, o, n);
            of_column += as_column;
#pragma unroll
            for (int c = 0; c < AT_ONCE; c++)
                if (k0 + c < row.K) sum[c] += (as_row + as_column) * (row.x[(k0 + c) * N + n] - row.x[(k0 + c) * N + o]);
        }
        of_column = reduce_warp(of_column, Add());
        if (k0 == 0 && lane_of_warp() == 0) s.q[n] = s.v[n] > 0 ? of_column + s.nu[n] * row.w[n] / s.v[n] : 0;
#pragma unroll
        for (int c = 0; c < AT_ONCE; c++) {
            if (k0 + c >= row.K) continue;
            REAL total = reduce_warp(sum[c], Add());
            if (lane_of_warp() == 0) s.mean[(k0 + c) * N + n] = -total / (REAL)epsilon;
        }
    }
}

/* As in transport_resample_backward.c. */
DEVICE void FN(store)(const TransportResample &p, int64_t b, const FN(Solver) &s) {
    const FN(Row) &row = s.row;
    const int64_t N = p.N, D = p.G + p.A;
    const double of_scale = row.widest < 0 ? 0 : -FN(dot)(row.K * N, s.mean, row.x) * row.K / N;
    double sum = 0;
    for_each_thread(N, [&](int64_t n) { sum += s.q[n]; });
    sum = sum_block(sum);
    auto of_coordinate = [&](int k, int64_t n) {
        REAL grad = row.w[n] * s.moved[k * N + n] + s.mean[k * N + n];
        return (grad + (k == row.widest ? (REAL)of_scale * row.x[k * N + n] : 0)) / (REAL)row.scale;
    };
    for_each_thread(N * D, [&](int64_t e) {
        const int64_t n = e / D;
        const int c = (int)(e % D);
        REAL angle = c < p.G ? 0 : ((const REAL *)p.particles)[b * N * D + e], grad = of_coordinate(c, n);
        if (c >= p.G) grad = cos(angle) * of_coordinate(c + p.A, n) - sin(angle) * grad;
        ((REAL *)p.grad_particles)[b * N * D + e] = grad;
    });
    for_each_thread(
        N, [&](int64_t n) { ((REAL *)p.grad_log_weights)[b * N + n] = row.collapsed ? 0 : s.q[n] - row.w[n] * (REAL)sum; });
}

template <int STATIC_K> static __global__ void FN(backward)(TransportResample p) {
    const int64_t b = blockIdx.x, N = p.N, D = p.G + p.A;
    FN(Solver) s;
    if (!FN(load_row)(p, b, true, s.row)) {
        for_each_thread(N * D, [&](int64_t n) { ((REAL *)p.grad_particles)[b * N * D + n] = NAN; });
        for_each_thread(N, [&](int64_t n) { ((REAL *)p.grad_log_weights)[b * N + n] = NAN; });
        return;
    }
    s.unit = (REAL)(LOG2E / p.epsilon);
    s.v = s.row.rest, s.m = s.v + N, s.nu = s.m + N, s.lambda = s.nu + N, s.residual = s.lambda + N, s.p = s.residual + N;
    s.q = s.p + N, s.grad = s.q + N, s.mean = s.grad + s.row.K * N, s.moved = s.mean + s.row.K * N;
    for_each_thread(2 * N, [&](int64_t n) { s.row.f[n] = ((const REAL *)p.potentials)[2 * b * N + n]; });
    FN(fill)(N, s.row.w, [&](int64_t n) { return FN(exp2_real)(s.row.w[n]); });
    FN(prepare)<STATIC_K>(p, b, s);
    FN(solve)<STATIC_K>(s);
    for_each_warp(N, [&](int64_t n) { FN(collect)<STATIC_K>(s, p.epsilon, n); });
    __syncthreads();
    FN(store)(p, b, s);
}

static int FN(launch_backward)(const TransportResample &p, void *stream) {
    const size_t shared = sizeof(Common) + (p.scratch ? 0 : transport_cuda_numbers(&p, true) * sizeof(REAL));
    if (transport_K(&p) == 4) return launch(FN(backward)<4>, p.B, THREADS, shared, stream, p);
    return launch(FN(backward)<0>, p.B, THREADS, shared, stream, p);
}
#endif
