/* Gradients of up to 512 queries of a row: every pair once, for every gradient (REAL, FN: for_each_real.h).
 *
 * Components are taken 128 at a time (a chunk), queries in groups of 16 lanes. A group's sums over the chunk (P d, then P h kc
 * and P h ks) stay in registers and are added up by chunks, so that rounding does not grow with N; the components' sums (P,
 * P d, P h cos, P h sin) are 16 lanes each in a buffer that fits the L1 cache, folded once for all groups. P below 2^-64 is
 * flushed to 0, which no sum can notice and which keeps products out of the denormal range. The bandwidth gradients are free:
 * sum_ij P d^2 = sum_i x_i (sum_j P d) - sum_j mu_j (sum_i P d), and likewise for h^2. Where forward has not been here, a
 * short row's kernels are summed first, a group at a time, and kept for the second look. No include guard: once for each REAL.
 */
#include "mixture_row.h"

#ifndef MDPS_MIXTURE_TILE_H
#define MDPS_MIXTURE_TILE_H
enum {
    GROUPS = MIXTURE_SUPER / LANES,
    CHUNK = MIXTURE_SHORT,  /* components */
    FOLD = 128,             /* rows */
    ABREAST = PAIRS / LANES /* components */
};
/* A group's features, rows of 16: F = G + 2 A coordinates; what P is made of: its gradient, and log2 of its sum, or the sum's
 * inverse and the least kernel that counts; then F sums over components. */
enum { GRADIENT, LOG2_SUM, INVERSE = LOG2_SUM, LEAST, BEFORE_SUMS };
#define ROW(group, f) ((group) + (int64_t)(f) * LANES) /* feature f of a group */
#endif

/* The sums of a chunk of queries, or of a short row. */
typedef struct {
    double *weights, *means; /* (padded N), (D, padded N): the gradients themselves */
    double *bandwidths;      /* (D): sum P (x - mu)^2 / beta^2, or sum P 2 sin^2((x - mu)/2); then sum P */
} FN(Sums);

INLINE FN(Sums) FN(sums_at)(const MixtureLogProb *p, double *start) {
    int64_t stride = mixture_padded(p->N);
    return (FN(Sums)){start, start + stride, start + (1 + p->G + p->A) * stride};
}

INLINE int64_t FN(group_size)(int G, int A) { return (int64_t)(2 * (G + 2 * A) + BEFORE_SUMS) * LANES; }

/* P of ABREAST components with a group: of exponents, or of kernels that were kept. */
INLINE void FN(weigh)(const REAL *t, int F, const REAL *a, const REAL *kept, REAL *pair) {
    const REAL *grad = ROW(t, F + GRADIENT), *log2_sum = ROW(t, F + LOG2_SUM);
    const REAL *inverse = ROW(t, F + INVERSE), *least = ROW(t, F + LEAST);
    if (kept) {
        EACH_PAIR(ABREAST, 1) {
            REAL kernel = kept[at + l] < least[l] ? 0 : kept[at + l];
            pair[at + l] = kernel * inverse[l] * grad[l]; /* in this order: gradient x inverse may be denormal */
        }
    } else {
        EACH_PAIR(ABREAST, 1) pair[at + l] = grad[l] * FN(exp2_from)(a[at + l] - log2_sum[l], -64);
    }
}

/* Adds the pairs of ABREAST components with a group to the group's sums s and to the components' lanes w. */
INLINE void
FN(add_pairs)(const REAL *t, const REAL *component, int64_t stride, const REAL *kept, int G, int A, REAL *s, REAL *w) {
    const int F = G + 2 * A;
    REAL a[PAIRS] __attribute__((aligned(64))), pair[PAIRS] __attribute__((aligned(64)));
    REAL d[MIXTURE_MAX_D * PAIRS] __attribute__((aligned(64))), *h = d + G * PAIRS;
    FN(exponents)(t, 0, component, stride, ABREAST, 1, G, A, a, d, h);
    FN(weigh)(t, F, a, kept, pair);
    EACH_PAIR(ABREAST, 1) w[j * (1 + F) * LANES + l] += pair[at + l];
#pragma GCC unroll 3
    for (int g = 0; g < G; g++) {
        EACH_PAIR(ABREAST, 1) {
            ROW(s, g)[l] += pair[at + l] * d[g * PAIRS + at + l];
            ROW(w, j * (1 + F) + 1 + g)[l] += pair[at + l] * d[g * PAIRS + at + l];
        }
    }
#pragma GCC unroll 2
    for (int i = G; i < G + A; i++) {
        const REAL *kc = component + (1 + i) * stride, *ks = kc + A * stride;
        const REAL *cosine = ROW(t, i), *sine = ROW(t, A + i);
        EACH_PAIR(ABREAST, 1) {
            REAL ph = pair[at + l] * d[i * PAIRS + at + l];
            ROW(s, i)[l] += ph * kc[j];
            ROW(s, A + i)[l] += ph * ks[j];
            ROW(w, j * (1 + F) + 1 + i)[l] += ph * cosine[l];
            ROW(w, j * (1 + F) + 1 + A + i)[l] += ph * sine[l];
        }
    }
}

/* A group with n components. */
INLINE void FN(add_group)(REAL *t, const REAL *components, int64_t n, int64_t stride, const REAL *kept, int G, int A, REAL *w) {
    const int F = G + 2 * A;
    REAL s[2 * MIXTURE_MAX_D * LANES] __attribute__((aligned(64)));
    for (int f = 0; f < F; f++) EACH_LANE ROW(s, f)[l] = 0;
    for (int64_t j = 0; j < n; j += ABREAST)
        FN(add_pairs)(t, components + j, stride, kept ? kept + j * LANES : 0, G, A, s, ROW(w, j * (1 + F)));
    for (int f = 0; f < F; f++) EACH_LANE ROW(t, F + BEFORE_SUMS + f)[l] += s[f * LANES + l];
}

/* A group's kernels with n components, 2^(a + BIAS), and from their sum what `weigh` needs; log2_sum becomes +inf where the sum
 * is too small to be trusted, otherwise 0. */
INLINE void FN(sum_group)(REAL *t, const REAL *components, int64_t n, int64_t n_components, int64_t stride, int G, int A,
                      REAL *kept, REAL *log2_sum) {
    const int F = G + 2 * A;
    const REAL enough = (REAL)n_components * (REAL)MIXTURE_ENOUGH;
    REAL s[LANES] = {0};
    for (int64_t first = 0; first < n_components; first += ABREAST, kept += PAIRS) {
        REAL a[PAIRS] __attribute__((aligned(64)));
        FN(exponents)(t, 0, components + first, stride, ABREAST, 1, G, A, a, 0, 0);
        EACH_PAIR(ABREAST, 1) kept[at + l] = a[at + l] = FN(exp2_biased)(a[at + l], MIXTURE_LEAST, MIXTURE_BIAS);
        EACH_PAIR(ABREAST, 1) s[l] += a[at + l];
    }
    EACH_LANE {
        bool good = l < n && s[l] > enough;
        REAL least = s[l] * (REAL)0x1p-64;
        ROW(t, F + INVERSE)[l] = good ? 1 / s[l] : 0;
        ROW(t, F + GRADIENT)[l] = good ? ROW(t, F + GRADIENT)[l] : 0;
        ROW(t, F + LEAST)[l] = least;
        s[l] = good ? 0 : (REAL)INFINITY;
    }
    for (int l = 0; l < n && l < LANES; l++) log2_sum[l] = s[l];
}

/* Sums of 16 lanes, n rows of them, by halves; leaves zeros. Many rows at a time, so that what one loop stores is in the cache
 * when the next one loads it in other pieces. */
INLINE void FN(sum_lanes)(REAL *w, int64_t n, REAL *sum) {
    for (; n > 0; n -= FOLD, w += FOLD * LANES, sum += FOLD) {
        REAL a[8 * FOLD] __attribute__((aligned(64))), b[4 * FOLD] __attribute__((aligned(64)));
        const int rows = n < FOLD ? (int)(n + LANES - 1) / LANES * LANES : FOLD;
        for (int i = 0; i < rows; i++) {
#pragma omp simd
            for (int l = 0; l < 8; l++) a[i * 8 + l] = w[i * 16 + l] + w[i * 16 + 8 + l];
            EACH_LANE w[i * 16 + l] = 0;
        }
        for (int i = 0; i < rows; i++) {
#pragma omp simd
            for (int l = 0; l < 4; l++) b[i * 4 + l] = a[i * 8 + l] + a[i * 8 + 4 + l];
        }
        for (int i = 0; i < rows; i += LANES) {
            const REAL *c = b + i * 4;
            EACH_LANE sum[i + l] = (c[4 * l] + c[4 * l + 2]) + (c[4 * l + 1] + c[4 * l + 3]);
        }
    }
}

/* The lanes of n components' sums, added up (all that `add_pairs` has touched becomes 0 again) and turned into gradients:
 * scaled units become those of the state. */
INLINE void FN(fold_chunk)(const MixtureRow *row, const REAL *components, int64_t n, int64_t stride, int G, int A, REAL *w,
                       int64_t j0, FN(Sums) out) {
    const int F = G + 2 * A;
    REAL sums[(1 + 2 * MIXTURE_MAX_D) * CHUNK] __attribute__((aligned(64))), *s = sums;
    FN(sum_lanes)(w, (n + ABREAST - 1) / ABREAST * ABREAST * (1 + F), sums);
    for (int64_t j = 0; j < n; j++) out.weights[j0 + j] += s[j * (1 + F)];
    for (int g = 0; g < G; g++) {
        double unit = row->scale[g] * (2 / LOG2E), square = 0, *means = out.means + g * stride + j0;
        const REAL *mean = components + (1 + g) * stride;
        s++;
#pragma omp simd reduction(+ : square)
        for (int64_t j = 0; j < n; j++) {
            means[j] += unit * s[j * (1 + F)];
            square += (double)mean[j] * s[j * (1 + F)];
        }
        out.bandwidths[g] -= (2 / LOG2E) * square;
    }
    for (int i = 0; i < A; i++) {
        const REAL *kc = components + (1 + G + i) * stride, *ks = kc + A * stride;
        double *means = out.means + (G + i) * stride + j0;
        s++;
        for (int64_t j = 0; j < n; j++)
            means[j] += ((double)kc[j] * s[j * (1 + F)] + (double)ks[j] * s[j * (1 + F) + A]) / LOG2E;
    }
}

/* Queries of the groups and what forward left of them; those that are computed exactly, and padding, become 0 with gradient 0.
 */
INLINE void FN(load_groups)(const MixtureLogProb *p, int64_t b, const MixtureRow *row, int64_t i0, int64_t n, int G, int A,
                        REAL *t) {
    const int F = G + 2 * A;
    const int64_t size = FN(group_size)(G, A);
    const REAL *log2_sum = (const REAL *)p->log2_sum + b * p->M + i0, *grad = (const REAL *)p->grad + b * p->M + i0;
    FN(load_queries)((const REAL *)p->x + (b * p->M + i0) * (G + A), n, row, G, A, t, size);
    for (int64_t i = 0; i < n; i += LANES, t += size) {
        REAL *to_grad = ROW(t, F + GRADIENT), *to_sum = ROW(t, F + LOG2_SUM);
        for (int f = 0; f < F; f++) EACH_LANE ROW(t, F + BEFORE_SUMS + f)[l] = 0;
        FN(copy_lanes)(grad + i, n - i, to_grad);
        if (mixture_sums_too(p)) continue;
        FN(copy_lanes)(log2_sum + i, n - i, to_sum);
        EACH_LANE to_grad[l] = to_sum[l] != INFINITY ? to_grad[l] : 0;
        EACH_LANE to_sum[l] = to_sum[l] != INFINITY ? to_sum[l] : 0;
    }
}

/* A group's part in the bandwidths' sums, a lane each. */
INLINE void FN(finish_group)(const REAL *t, int G, int A, double *squares) {
    const int F = G + 2 * A, D = G + A;
    const REAL *sum = ROW(t, F + BEFORE_SUMS);
    for (int g = 0; g < G; g++) EACH_LANE squares[g * LANES + l] += (double)ROW(t, g)[l] * ROW(sum, g)[l];
    for (int i = G; i < D; i++)
        EACH_LANE squares[i * LANES + l] +=
            (double)ROW(t, A + i)[l] * ROW(sum, i)[l] - (double)ROW(t, i)[l] * ROW(sum, A + i)[l];
    EACH_LANE squares[D * LANES + l] += ROW(t, F + GRADIENT)[l];
}

/* Gradients of a group's queries from their sums. */
INLINE void FN(store_group)(const MixtureRow *row, const REAL *t, int64_t n, int G, int A, REAL *x) {
    const int D = G + A;
    const REAL *sum = ROW(t, G + 2 * A + BEFORE_SUMS);
    for (int g = 0; g < G; g++) {
        REAL unit = (REAL)(-row->scale[g] * (2 / LOG2E));
        for (int l = 0; l < n; l++) x[l * D + g] = unit * ROW(sum, g)[l];
    }
    for (int i = G; i < D; i++)
        for (int l = 0; l < n; l++)
            x[l * D + i] = -(ROW(t, i)[l] * ROW(sum, i)[l] + ROW(t, A + i)[l] * ROW(sum, A + i)[l]) * (REAL)(1 / LOG2E);
}

INLINE void FN(finish_groups)(const MixtureLogProb *p, int64_t b, const MixtureRow *row, int64_t i0, int64_t n, int G, int A,
                          const REAL *t, FN(Sums) out) {
    const int D = G + A;
    double squares[(MIXTURE_MAX_D + 1) * LANES] __attribute__((aligned(64)));
    memset(squares, 0, sizeof(double) * (D + 1) * LANES);
    for (int64_t i = 0; i < n; i += LANES, t += FN(group_size)(G, A)) {
        FN(finish_group)(t, G, A, squares);
        if (!p->grad_x) continue;
        REAL *grad_x = (REAL *)p->grad_x + (b * p->M + i0 + i) * D;
        if (n - i >= LANES) FN(store_group)(row, t, LANES, G, A, grad_x);
        else FN(store_group)(row, t, n - i, G, A, grad_x);
    }
    for (int d = 0; d <= D; d++) {
        double unit = d < G ? 2 / LOG2E : d < D ? 2 / (row->scale[d] * row->scale[d]) : 1, sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int l = 0; l < LANES; l++) sum += squares[d * LANES + l];
        out.bandwidths[d] += unit * sum;
    }
}

/* Queries i0 .. i0 + n of a row, n <= 512: every pair once. */
INLINE void
FN(super_tile)(const MixtureLogProb *p, int64_t b, const MixtureRow *row, const REAL *components, int64_t i0, int64_t n,
                       int G, int A, REAL *w, FN(Sums) out) {
    const int64_t stride = mixture_padded(p->N), size = FN(group_size)(G, A);
    REAL t[GROUPS * (4 * MIXTURE_MAX_D + BEFORE_SUMS) * LANES] __attribute__((aligned(64)));
    REAL kept[CHUNK * LANES] __attribute__((aligned(64)));
    FN(load_groups)(p, b, row, i0, n, G, A, t);
    for (int64_t j0 = 0; j0 < p->N; j0 += CHUNK) {
        const int64_t rest = p->N - j0 < CHUNK ? p->N - j0 : CHUNK;
        for (int64_t i = 0; i < n; i += LANES) {
            REAL *group = t + i / LANES * size;
            if (mixture_sums_too(p)) {
                FN(sum_group)(group, components, n - i, rest, stride, G, A, kept, (REAL *)p->log2_sum + b * p->M + i0 + i);
                FN(add_group)(group, components, rest, stride, kept, G, A, w);
            } else FN(add_group)(group, components + j0, rest, stride, 0, G, A, w);
        }
        FN(fold_chunk)(row, components + j0, rest, stride, G, A, w, j0, out);
    }
    FN(finish_groups)(p, b, row, i0, n, G, A, t, out);
}
