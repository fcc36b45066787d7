/* The mathematics of mixture rows, shared by the forward and the backward pass of mixture_log_prob (REAL, FN: for_each_real.h).
 *
 * Everything is in base 2. A pair's exponent is  a = c_j - sum_g (x_g - mu_g)^2 - sum_a h_a^2  in scaled coordinates, with
 * h = r sin((theta - mu) / 2) and r^2 = 2 kappa log2(e). The half angle keeps kappa (cos - 1) from cancelling, and
 * sin((theta - mu)/2) = s kc - c ks comes from the sines and cosines of both half angles: no transcendental function a pair.
 * The signs that a wrap by 2 pi flips vanish in the square. Linear coordinates are centred before they are scaled.
 * No include guard: a file includes it once for each REAL.
 */
#include "mixture_log_prob.h"
#include "real_math.h"

#ifndef MDPS_MIXTURE_ROW_H
#define MDPS_MIXTURE_ROW_H
enum { LANES = 16, PAIRS = 64 /* computed side by side, which hides the latency of a pair's chain of operations */ };
/* Loops that become vector instructions; without the pragma gcc unrolls the lanes instead. */
#define EACH_LANE _Pragma("omp simd") for (int l = 0; l < LANES; l++)
#define EACH_PAIR(J, K)                                 \
    _Pragma("GCC unroll 4") for (int j = 0; j < J; j++) \
        _Pragma("GCC unroll 4") for (int k = 0, at = j * K * LANES; k < K; k++, at += LANES) EACH_LANE
#endif

/* Queries are held in groups of 16 lanes, a row of 16 numbers a feature: G scaled coordinates, A cosines, A sines of half
 * angles; `size` numbers a group, with what else its user keeps of it. Fills the groups of n queries, with 0 behind the last.
 */
INLINE void FN(load_queries)(const REAL *x, int64_t n, const MixtureRow *row, int G, int A, REAL *q, int64_t size) {
    const int D = G + A;
    for (; n > 0; x += D * LANES, n -= LANES, q += size) {
        REAL state[LANES * MIXTURE_MAX_D];
        const REAL *from = x;
        if (n < LANES) {
            for (int i = 0; i < LANES * D; i++) state[i] = 0;
            for (int i = 0; i < n * D; i++) state[i] = x[i];
            from = state;
        }
        for (int g = 0; g < G; g++) {
            REAL centre = (REAL)row->centre[g], scale = (REAL)row->scale[g];
            EACH_LANE q[g * LANES + l] = (from[l * D + g] - centre) * scale;
        }
        for (int k = G; k < D; k++) {
            EACH_LANE {
                REAL u = FN(turns)(from[l * D + k]), v = u * u;
                q[k * LANES + l] = FN(cospi_poly)(v);
                q[(k + A) * LANES + l] = u * FN(sinpi_over)(v);
            }
        }
    }
}

/* A group's lanes of an array, 0 behind its n numbers. */
INLINE void FN(copy_lanes)(const REAL *from, int64_t n, REAL *to) {
    if (n < LANES) {
        EACH_LANE to[l] = 0;
        for (int64_t l = 0; l < n; l++) to[l] = from[l];
    } else EACH_LANE to[l] = from[l];
}

/* Of J components and K groups (compile-time numbers, J K = PAIRS / LANES): a = c - sum of squares, the pairs of a
 * component and a group side by side; what backward needs of each pair: d (G times PAIRS), h (A times PAIRS). */
INLINE void
FN(exponents)(const REAL *q, int64_t size, const REAL *component, int64_t stride, int J, int K, int G, int A, REAL *a,
                      REAL *d, REAL *h) {
    EACH_PAIR(J, K) a[at + l] = component[j];
#pragma GCC unroll 3
    for (int g = 0; g < G; g++) {
        const REAL *x = q + g * LANES, *mean = component + (1 + g) * stride;
        EACH_PAIR(J, K) {
            REAL difference = x[k * size + l] - mean[j];
            if (d) d[g * PAIRS + at + l] = difference;
            a[at + l] -= difference * difference;
        }
    }
#pragma GCC unroll 2
    for (int i = 0; i < A; i++) {
        const REAL *cosine = q + (G + i) * LANES, *sine = cosine + A * LANES;
        const REAL *kc = component + (1 + G + i) * stride, *ks = kc + A * stride;
        EACH_PAIR(J, K) {
            REAL half = sine[k * size + l] * kc[j] - cosine[k * size + l] * ks[j];
            if (h) h[i * PAIRS + at + l] = half;
            a[at + l] -= half * half;
        }
    }
}

/* The same for one query and n components in double, straight from the arguments: log2 of weight times kernel over its value at
 * the mean. u[k] are the turns of the angular differences. */
typedef struct {
    double a[MIXTURE_BLOCK], d[MIXTURE_MAX_D][MIXTURE_BLOCK]; /* d: (x - mu) / beta, or sin((x - mu) / 2) */
} FN(Block);

INLINE void
FN(exact_block)(const MixtureLogProb *p, int64_t b, const MixtureRow *row, const REAL *x, int64_t j0, int64_t n, int G,
                        int A, FN(Block) *k) {
    const int D = G + A;
    const REAL *means = (const REAL *)p->means + (b * p->N + j0) * D, *weights = (const REAL *)p->log_weights + b * p->N + j0;
    for (int64_t l = 0; l < n; l++) k->a[l] = weights[l] * LOG2E;
    for (int g = 0; g < G; g++) {
        double at = x[g], inverse = row->scale[g] / sqrt(0.5 * LOG2E), *d = k->d[g];
        for (int64_t l = 0; l < n; l++) {
            d[l] = (at - means[l * D + g]) * inverse;
            k->a[l] -= 0.5 * LOG2E * d[l] * d[l];
        }
    }
    for (int g = G; g < D; g++) {
        double at = x[g], square = row->scale[g] * row->scale[g], *d = k->d[g];
        for (int64_t l = 0; l < n; l++) {
            double u = turns_f64(at - means[l * D + g]);
            d[l] = u * sinpi_over_f64(u * u);
            k->a[l] -= square * d[l] * d[l];
        }
    }
}

/* log2 of the query's sum as top + log2(sum): blocks of components, each relative to the largest exponent so far. */
INLINE void FN(exact_sum)(const MixtureLogProb *p, int64_t b, const MixtureRow *row, const REAL *x, int G, int A, FN(Block) *k,
                      double *top, double *sum) {
    double m = -INFINITY, s = 0, probe = 0;
    for (int64_t j0 = 0; j0 < p->N; j0 += MIXTURE_BLOCK) {
        int64_t n = p->N - j0 < MIXTURE_BLOCK ? p->N - j0 : MIXTURE_BLOCK;
        FN(exact_block)(p, b, row, x, j0, n, G, A, k);
        double largest = m, part = 0;
#pragma omp simd reduction(max : largest) reduction(+ : probe)
        for (int64_t l = 0; l < n; l++) {
            largest = k->a[l] > largest ? k->a[l] : largest;
            probe += k->a[l];
        }
        if (largest == -INFINITY) continue;
#pragma omp simd reduction(+ : part)
        for (int64_t l = 0; l < n; l++) part += exp2_real_f64(k->a[l] - largest);
        s = s * exp2_real_f64(m - largest) + part;
        m = largest;
    }
    *top = m;
    *sum = probe != probe ? probe : s;
}
