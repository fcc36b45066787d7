/* Sums of queries over components that pass by in shared memory (REAL, FN: for_each_real.h; no include guard). */
#include "mixture_exact.cuh"

/* sum[r] += sum over the components [first, last) of 2^(exponent + BIAS). */
template <int G, int A, int R, bool HALF>
DEVICE void FN(sum_pairs)(const MixtureLogProb &p, const FN(Row) &row, REAL (*value)[MIXTURE_THREADS], int64_t b, int64_t first,
                      int64_t last, const REAL (&q)[R][Features<G, A>::n], REAL (&sum)[R]) {
    const int n_linear = G == ANY ? p.G : G, n_angular = A == ANY ? p.A : A, n_values = 1 + n_linear + 2 * n_angular;
    for (int64_t j0 = first; j0 < last; j0 += MIXTURE_THREADS) {
        REAL own[1 + Features<G, A>::n], part[R] = {};
        const int n = last - j0 < MIXTURE_THREADS ? (int)(last - j0) : MIXTURE_THREADS;
        FN(load_component)<G, A, HALF>(p, row, b, j0 + threadIdx.x, last, MIXTURE_BIAS, own);
        __syncthreads();
#pragma unroll
        for (int v = 0; v < n_values; v++) value[v][threadIdx.x] = own[v];
        __syncthreads();
        for (int k0 = 0; k0 < n; k0 += Turn<G>::n) {
#pragma unroll
            for (int k = k0; k < k0 + Turn<G>::n; k += 4) {
                REAL v[1 + Features<G, A>::n][4];
#pragma unroll
                for (int f = 0; f < n_values; f++) load_four(&value[f][k], v[f]);
#pragma unroll
                for (int c = 0; c < 4; c++)
#pragma unroll
                    for (int r = 0; r < R; r++) {
                        REAL a = v[0][c];
#pragma unroll
                        for (int g = 0; g < n_linear; g++) {
                            REAL d = q[r][g] - v[1 + g][c];
                            a -= d * d;
                        }
#pragma unroll
                        for (int i = 0; i < n_angular; i++) {
                            REAL cosine = q[r][n_linear + i], sine = q[r][n_linear + n_angular + i];
                            REAL kc = v[1 + n_linear + i][c], ks = v[1 + n_linear + n_angular + i][c], h = sine * kc;
                            h -= cosine * ks;
                            if (HALF) a -= h * h;
                            else a += cosine * kc, a += sine * ks;
                        }
                        part[r] += exp2_pair(a);
                    }
            }
        }
#pragma unroll
        for (int r = 0; r < R; r++) sum[r] += part[r];
    }
}

/* Query i of row b from its sum; those that are too small to be trusted, or not regular, are marked by an infinite log2_sum. */
DEVICE void FN(settle_query)(const MixtureLogProb &p, const FN(Row) &row, int64_t b, int64_t i, REAL sum, bool regular) {
    if (i >= p.M) return;
    const bool good = regular && sum > (REAL)p.N * (REAL)MIXTURE_ENOUGH;
    const REAL q = good ? FN(log2_less)(sum, MIXTURE_BIAS) : INFINITY;
    ((REAL *)p.log2_sum)[b * p.M + i] = q;
    ((REAL *)p.log_prob)[b * p.M + i] = q * (REAL)LN2 + (REAL)((double)row.extreme[0] + FN(log_norm_of)(p, row));
}
