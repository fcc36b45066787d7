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

/* Queries first .. first + n of a row as features of a tile: q[f][MIXTURE_TILE], G scaled coordinates, then A cosines and A
 * sines. */
INLINE void FN(load_queries)(const REAL *x, int64_t n, const MixtureRow *row, int G, int A, REAL *q) {
    const int D = G + A;
    for (int d = 0; d < D; d++) {
        REAL *out = q + (int64_t)d * MIXTURE_TILE;
        for (int64_t l = 0; l < n; l++) out[l] = x[l * D + d];
        for (int64_t l = n; l < MIXTURE_TILE; l++) out[l] = 0;
    }
    for (int g = 0; g < G; g++) {
        REAL centre = (REAL)row->centre[g], scale = (REAL)row->scale[g], *out = q + (int64_t)g * MIXTURE_TILE;
        for (int l = 0; l < MIXTURE_TILE; l++) out[l] = (out[l] - centre) * scale;
    }
    for (int k = 0; k < A; k++) {
        REAL *cosine = q + (int64_t)(G + k) * MIXTURE_TILE, *sine = cosine + (int64_t)A * MIXTURE_TILE;
        for (int l = 0; l < MIXTURE_TILE; l++) {
            REAL u = FN(turns)(cosine[l]), v = u * u;
            cosine[l] = FN(cospi_poly)(v);
            sine[l] = u * FN(sinpi_over)(v);
        }
    }
}

/* a = c - sum of squares for one component and a tile of queries; what backward needs of each pair: d (G tiles), h (A tiles).
 */
INLINE void
FN(exponents)(const REAL *q, const REAL *component, int64_t stride, REAL c, int G, int A, REAL *a, REAL *d, REAL *h) {
    for (int l = 0; l < MIXTURE_TILE; l++) a[l] = c;
#pragma GCC unroll 3
    for (int g = 0; g < G; g++) {
        const REAL *x = q + (int64_t)g * MIXTURE_TILE, mean = component[(1 + g) * stride];
        REAL *dg = d ? d + (int64_t)g * MIXTURE_TILE : 0;
        for (int l = 0; l < MIXTURE_TILE; l++) {
            REAL difference = x[l] - mean;
            if (d) dg[l] = difference;
            a[l] -= difference * difference;
        }
    }
#pragma GCC unroll 2
    for (int k = 0; k < A; k++) {
        const REAL *cosine = q + (int64_t)(G + k) * MIXTURE_TILE, *sine = cosine + (int64_t)A * MIXTURE_TILE;
        REAL kc = component[(1 + G + k) * stride], ks = component[(1 + G + A + k) * stride];
        REAL *hk = h ? h + (int64_t)k * MIXTURE_TILE : 0;
        for (int l = 0; l < MIXTURE_TILE; l++) {
            REAL half = sine[l] * kc - cosine[l] * ks;
            if (h) hk[l] = half;
            a[l] -= half * half;
        }
    }
}

/* The same for one query and n components in double, straight from the arguments: log2 of weight times kernel over its value at
 * the mean. u[k] are the turns of the angular differences. */
typedef struct {
    double a[MIXTURE_BLOCK], d[MIXTURE_MAX_D][MIXTURE_BLOCK]; /* d: (x - mu) / beta, or sin((x - mu) / 2) */
} FN(Block);

INLINE void FN(exact_block)(const MixtureLogProb *p, int64_t b, const REAL *x, int64_t j0, int64_t n, int G, int A,
                            FN(Block) *k) {
    const int D = G + A;
    const REAL *means = (const REAL *)p->means + (b * p->N + j0) * D, *weights = (const REAL *)p->log_weights + b * p->N + j0;
    const MixtureRow *row = p->rows + b;
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
INLINE void FN(exact_sum)(const MixtureLogProb *p, int64_t b, const REAL *x, int G, int A,
                          FN(Block) *k, double *top, double *sum) {
    double m = -INFINITY, s = 0, probe = 0;
    for (int64_t j0 = 0; j0 < p->N; j0 += MIXTURE_BLOCK) {
        int64_t n = p->N - j0 < MIXTURE_BLOCK ? p->N - j0 : MIXTURE_BLOCK;
        FN(exact_block)(p, b, x, j0, n, G, A, k);
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
