/* The two passes of mixture_log_prob_backward.cu over the pairs (REAL, FN: for_each_real.h; no include guard). */
#include "mixture_sum.cuh"

/* What passes by: components as c_j + BIAS and features, or queries as -log2 of the sum, gradient and features. */
template <int G, int A> struct FN(Passing) {
    FN(Row) row;
    double shared[WARP]; /* of reductions */
    FN(ExactSums) exact;
    alignas(16) REAL value[2 + Features<G, A>::n][MIXTURE_THREADS];
};

DEVICE REAL FN(add_splits)(const REAL *sums, int64_t e, int64_t stride, int64_t splits) {
    double sum = 0;
    for (int64_t i = 0; i < splits; i++) sum += sums[i * stride + e];
    return (REAL)sum;
}

/* Where number e of (B, N, 1 + D), weight and mean of each component, belongs. */
DEVICE REAL *FN(component_gradient)(const MixtureLogProb &p, int64_t e) {
    const int64_t D = p.G + p.A, j = e / (1 + D), d = e % (1 + D);
    return d == 0 ? (REAL *)p.grad_log_weights + j : (REAL *)p.grad_means + j * D + d - 1;
}

/* A pair's exponent: a less what the differences in coordinates, and h, take from it; both are kept. */
template <int G, int A>
DEVICE REAL FN(exponent)(int n_linear, int n_angular, REAL a, const REAL *q, const REAL *v, REAL *difference) {
#pragma unroll
    for (int g = 0; g < n_linear; g++) {
        difference[g] = q[g] - v[g];
        a -= difference[g] * difference[g];
    }
#pragma unroll
    for (int i = n_linear; i < n_linear + n_angular; i++) {
        REAL h = q[n_angular + i] * v[i];
        h -= q[i] * v[n_angular + i];
        difference[i] = h;
        a -= h * h;
    }
    return a;
}

/* What a block's threads have for the bandwidths: one number each for dimension e; all threads call it. */
DEVICE void FN(put_bandwidth)(const MixturePlan &plan, int64_t b, int64_t slot, int e, double mine, double *shared) {
    double sum = reduce_block(mine, 0., Add(), shared);
    if (threadIdx.x == 0) plan.bandwidth_sums[(b * plan.slots + slot) * (plan.p.G + plan.p.A + 1) + e] = sum;
}

/* sums[r][f] += sum over the components [first, last) of 2^(exponent + BIAS) times d, h kc, h ks. */
template <int G, int A, int R>
DEVICE void FN(gather_components)(const MixtureLogProb &p, FN(Passing)<G, A> &s, int64_t b, int64_t first, int64_t last,
                              const REAL (&q)[R][Features<G, A>::n], REAL (&sums)[R][Features<G, A>::n]) {
    const int n_linear = G == ANY ? p.G : G, n_angular = A == ANY ? p.A : A, F = n_linear + 2 * n_angular;
    for (int64_t j0 = first; j0 < last; j0 += MIXTURE_THREADS) {
        REAL own[1 + Features<G, A>::n], part[R][Features<G, A>::n] = {};
        const int n = last - j0 < MIXTURE_THREADS ? (int)(last - j0) : MIXTURE_THREADS;
        FN(load_component)<G, A, true>(p, s.row, b, j0 + threadIdx.x, last, MIXTURE_BIAS, own);
        __syncthreads();
#pragma unroll
        for (int f = 0; f <= F; f++) s.value[f][threadIdx.x] = own[f];
        __syncthreads();
        for (int k0 = 0; k0 < n; k0 += Turn<G>::n) {
#pragma unroll
            for (int k = k0; k < k0 + Turn<G>::n; k++) {
                REAL v[1 + Features<G, A>::n];
#pragma unroll
                for (int f = 0; f <= F; f++) v[f] = s.value[f][k];
#pragma unroll
                for (int r = 0; r < R; r++) {
                    REAL d[Features<G, A>::n], e = exp2_pair(FN(exponent)<G, A>(n_linear, n_angular, v[0], q[r], v + 1, d));
#pragma unroll
                    for (int g = 0; g < n_linear; g++) part[r][g] += e * d[g];
#pragma unroll
                    for (int i = n_linear; i < n_linear + n_angular; i++) {
                        REAL eh = e * d[i];
                        part[r][i] += eh * v[1 + i];
                        part[r][n_angular + i] += eh * v[1 + n_angular + i];
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int f = 0; f < F; f++) sums[r][f] += part[r][f];
    }
}

/* Gradients of R queries a thread, for one split of the components. The row is prepared. */
template <int G, int A, int R>
DEVICE void FN(pass_of_queries)(const MixturePlan &plan, int64_t b, int64_t tile, int64_t split, FN(Passing)<G, A> &s) {
    const MixtureLogProb &p = plan.p;
    const int n_linear = G == ANY ? p.G : G, n_angular = A == ANY ? p.A : A, D = n_linear + n_angular;
    const int64_t i0 = tile * R * MIXTURE_THREADS + threadIdx.x, first = split * plan.queries.split_length;
    const int64_t end = first + plan.queries.split_length, slot = plan.flags + split * plan.queries.tiles + tile;
    REAL q[R][Features<G, A>::n], sums[R][Features<G, A>::n] = {}, weight[R];
    double total = 0;
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int64_t i = i0 + r * MIXTURE_THREADS, at = b * p.M + (i < p.M ? i : p.M - 1);
        const REAL left = ((const REAL *)p.log2_sum)[at], grad = ((const REAL *)p.grad)[at];
        const bool here = i < p.M && left != INFINITY;
        FN(load_features)<G, A, true>(p, s.row, (const REAL *)p.x + at * D, q[r]);
        weight[r] = here ? grad * FN(exp2_real)(-left - MIXTURE_BIAS) : 0;
        total += here && split == 0 ? grad : 0;
#pragma unroll
        for (int f = 0; f < n_linear + 2 * n_angular; f++) q[r][f] = here ? q[r][f] : 0;
    }
    if (FN(is_regular)(p, s.row)) FN(gather_components)<G, A, R>(p, s, b, first, end < p.N ? end : p.N, q, sums);
    REAL *out = plan.queries.splits > 1 ? (REAL *)plan.query_sums + split * p.B * p.M * D : (REAL *)p.grad_x;
#pragma unroll
    for (int d = 0; d < D; d++) {
        const double scale = s.row.scale[d];
        double mine = 0;
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int64_t i = i0 + r * MIXTURE_THREADS;
            REAL slope;
            if (d < n_linear) {
                slope = weight[r] * sums[r][d] * (REAL)(scale * (2 / LOG2E));
                mine += (2 / LOG2E) * q[r][d] * (weight[r] * sums[r][d]);
            } else {
                REAL cosine = q[r][d], sine = q[r][n_angular + d], c = weight[r] * sums[r][d],
                     t = weight[r] * sums[r][n_angular + d];
                slope = (cosine * c + sine * t) * (REAL)(1 / LOG2E);
                mine += ((double)sine * c - (double)cosine * t) * 2 / (scale * scale);
            }
            const bool is_exact = i >= p.M || ((const REAL *)p.log2_sum)[b * p.M + i] == INFINITY;
            if (out && !is_exact) out[(b * p.M + i) * D + d] = -slope;
        }
        FN(put_bandwidth)(plan, b, slot, d, mine, s.shared);
    }
    FN(put_bandwidth)(plan, b, slot, D, total, s.shared);
}

/* Loads query i of row b; beyond `end`, and where it is computed exactly, it has no weight. */
template <int G, int A>
DEVICE void FN(load_query)(const MixtureLogProb &p, const FN(Row) &row, int64_t b, int64_t i, int64_t end, REAL *v) {
    const int F = G == ANY ? p.G + 2 * p.A : G + 2 * A;
    REAL left = i < end ? ((const REAL *)p.log2_sum)[b * p.M + i] : INFINITY;
    v[0] = -INFINITY, v[1] = 0;
#pragma unroll
    for (int f = 0; f < F; f++) v[2 + f] = 0;
    if (left == INFINITY) return;
    v[0] = -left, v[1] = ((const REAL *)p.grad)[b * p.M + i];
    FN(load_features)<G, A, true>(p, row, (const REAL *)p.x + (b * p.M + i) * (p.G + p.A), v + 2);
}

/* sums[r]: of P, then of P d, P h cos, P h sin over the queries [first, last). */
template <int G, int A, int R>
DEVICE void FN(gather_queries)(const MixtureLogProb &p, FN(Passing)<G, A> &s, int64_t b, int64_t first, int64_t last,
                           const REAL (&own)[R][1 + Features<G, A>::n], REAL (&sums)[R][1 + Features<G, A>::n]) {
    const int n_linear = G == ANY ? p.G : G, n_angular = A == ANY ? p.A : A, F = n_linear + 2 * n_angular;
    for (int64_t i0 = first; i0 < last; i0 += MIXTURE_THREADS) {
        REAL query[2 + Features<G, A>::n], part[R][1 + Features<G, A>::n] = {};
        const int n = last - i0 < MIXTURE_THREADS ? (int)(last - i0) : MIXTURE_THREADS;
        FN(load_query)<G, A>(p, s.row, b, i0 + threadIdx.x, last, query);
        __syncthreads();
#pragma unroll
        for (int f = 0; f < 2 + F; f++) s.value[f][threadIdx.x] = query[f];
        __syncthreads();
        for (int k0 = 0; k0 < n; k0 += Turn<G>::n) {
#pragma unroll
            for (int k = k0; k < k0 + Turn<G>::n; k++) {
                REAL v[2 + Features<G, A>::n];
#pragma unroll
                for (int f = 0; f < 2 + F; f++) v[f] = s.value[f][k];
#pragma unroll
                for (int r = 0; r < R; r++) {
                    REAL d[Features<G, A>::n], a = own[r][0] + v[0];
                    REAL P = v[1] * exp2_pair(FN(exponent)<G, A>(n_linear, n_angular, a, v + 2, own[r] + 1, d));
                    part[r][0] += P;
#pragma unroll
                    for (int g = 0; g < n_linear; g++) part[r][1 + g] += P * d[g];
#pragma unroll
                    for (int i = n_linear; i < n_linear + n_angular; i++) {
                        REAL Ph = P * d[i];
                        part[r][1 + i] += Ph * v[2 + i];
                        part[r][1 + n_angular + i] += Ph * v[2 + n_angular + i];
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int f = 0; f <= F; f++) sums[r][f] += part[r][f];
    }
}

/* Gradients of R components a thread, for one split of the queries. The row is prepared. */
template <int G, int A, int R>
DEVICE void FN(pass_of_components)(const MixturePlan &plan, int64_t b, int64_t tile, int64_t split, FN(Passing)<G, A> &s) {
    const MixtureLogProb &p = plan.p;
    const int n_linear = G == ANY ? p.G : G, n_angular = A == ANY ? p.A : A, D = n_linear + n_angular;
    const MixtureCut &cut = plan.components;
    const int64_t j0 = tile * R * MIXTURE_THREADS + threadIdx.x, first = split * cut.split_length;
    const int64_t last = first + cut.split_length < p.M ? first + cut.split_length : p.M;
    const int64_t slot = plan.flags + plan.queries.tiles * plan.queries.splits + split * cut.tiles + tile;
    REAL own[R][1 + Features<G, A>::n], sums[R][1 + Features<G, A>::n] = {};
#pragma unroll
    for (int r = 0; r < R; r++) FN(load_component)<G, A, true>(p, s.row, b, j0 + r * MIXTURE_THREADS, p.N, 0, own[r]);
    if (FN(is_regular)(p, s.row)) FN(gather_queries)<G, A, R>(p, s, b, first, last, own, sums);
#pragma unroll
    for (int d = 0; d < n_linear; d++) {
        double mine = 0;
#pragma unroll
        for (int r = 0; r < R; r++) mine -= (2 / LOG2E) * own[r][1 + d] * sums[r][1 + d];
        FN(put_bandwidth)(plan, b, slot, d, mine, s.shared);
    }
    for (int d = n_linear + threadIdx.x; d <= D; d += MIXTURE_THREADS)
        plan.bandwidth_sums[(b * plan.slots + slot) * (D + 1) + d] = 0;
    REAL *out = (REAL *)plan.component_sums + split * p.B * p.N * (1 + D);
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int64_t j = j0 + r * MIXTURE_THREADS, e = (b * p.N + j) * (1 + D);
#pragma unroll
        for (int d = 0; d <= D; d++) {
            REAL grad = sums[r][d];
            if (d > 0 && d <= n_linear) grad *= (REAL)(s.row.scale[d - 1] * (2 / LOG2E));
            if (d > n_linear) grad = (own[r][d] * grad + own[r][n_angular + d] * sums[r][n_angular + d]) * (REAL)(1 / LOG2E);
            if (j < p.N) *(cut.splits > 1 ? out + e + d : FN(component_gradient)(p, e + d)) = grad;
        }
    }
#pragma unroll 1
    for (int64_t j = j0; j < j0 + R * MIXTURE_THREADS && j < p.N; j += MIXTURE_THREADS)
#pragma unroll 1
        for (int d = 0; d <= D; d++) {
            const int64_t e = (b * p.N + j) * (1 + D) + d;
            REAL *grad = cut.splits > 1 ? out + e : FN(component_gradient)(p, e);
            *grad = (REAL)(*grad + FN(from_exact_queries)(plan, s.row, b, first, last, j, d));
        }
}
