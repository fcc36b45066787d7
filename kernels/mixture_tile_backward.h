/* Gradients of a tile of queries: every pair once, for every gradient (REAL, FN: for_each_real.h).
 *
 * Queries are taken 512 at a time (a super-tile), components 8 at a time. For each tile of 64 queries, first P, d and P h of
 * the 8 x 64 pairs are written to a buffer that stays in L1 (the exponent's chain is long; alone in a loop it fills the ports),
 * then short loops add them to the queries' sums, kept over the components, and to the components' sums, kept over the
 * super-tile as 16 lanes each and folded once. P below 2^-64 is flushed to 0, which no sum can notice and which keeps products
 * out of the denormal range. The bandwidth gradients cost nothing a pair:
 * sum_ij P d^2 = sum_i x_i (sum_j P d) - sum_j mu_j (sum_i P d), and likewise for h^2.
 * No include guard: a file includes it once for each REAL.
 */
#include "mixture_row.h"

#ifndef MDPS_MIXTURE_TILE_H
#define MDPS_MIXTURE_TILE_H
enum {
    SUPER = 8,   /* tiles of a super-tile */
    BLOCK_J = 8, /* components of a block */
    LANES = 16   /* of a component's sums */
};
#define ROW(tile, f) ((tile) + (int64_t)(f) * MIXTURE_TILE) /* feature f of a tile */
#endif

/* The sums of a chunk. */
typedef struct {
    double *weights, *means; /* (padded N), (D, padded N): the gradients themselves */
    double *bandwidths;      /* (D): sum P (x - mu)^2 / beta^2, or sum P 2 sin^2((x - mu)/2); then sum P */
} FN(Sums);

INLINE FN(Sums) FN(sums_of)(const MixtureLogProb *p, int64_t b, int64_t chunk) {
    double *start = p->sums + (b * mixture_chunks(p) + chunk) * mixture_sums(p);
    int64_t stride = mixture_padded(p->N);
    return (FN(Sums)){start, start + stride, start + (1 + p->G + p->A) * stride};
}

/* A tile of queries, features in rows of 64: F = G + 2 A coordinates, what forward left (log2 of its sum, its gradient), and F
 * sums over components: P d, then P h kc and P h ks. */
INLINE int64_t FN(tile_size)(int G, int A) { return (int64_t)(2 * (G + 2 * A) + 2) * MIXTURE_TILE; }

/* into[lane] += sum over the tile's groups of 16 of a b. */
INLINE void FN(fold)(REAL *into, const REAL *a, const REAL *b) {
    for (int group = 0; group < MIXTURE_TILE; group += LANES)
        for (int l = 0; l < LANES; l++) into[l] += a[group + l] * b[group + l];
}

/* Pairs of a tile with a block of components: P, then d, then P h; and the components' sums of P. */
INLINE void
FN(pairs_of_block)(const REAL *t, const REAL *components, int n, int64_t stride, int G, int A, REAL *pairs, REAL *w) {
    const REAL *log2_sum = ROW(t, G + 2 * A), *grad = ROW(t, G + 2 * A + 1);
    for (int j = 0; j < n; j++) {
        REAL a[MIXTURE_TILE] __attribute__((aligned(64))), p[MIXTURE_TILE] __attribute__((aligned(64)));
        REAL *h = ROW(pairs, BLOCK_J * (1 + G) + j * A);
        FN(exponents)(t, components + j, stride, components[j], G, A, a, ROW(pairs, BLOCK_J + j * G), h);
        for (int l = 0; l < MIXTURE_TILE; l++) p[l] = grad[l] * FN(exp2_from)(a[l] - log2_sum[l], -64);
#pragma GCC unroll 2
        for (int i = 0; i < A; i++)
            for (int l = 0; l < MIXTURE_TILE; l++) ROW(h, i)[l] *= p[l];
        memcpy(ROW(pairs, j), p, sizeof p);
        for (int group = 0; group < MIXTURE_TILE; group += LANES)
            for (int l = 0; l < LANES; l++) w[j * LANES + l] += p[group + l];
    }
}

/* The queries' sums of P d, P h kc, P h ks, and the components' lanes w[f][j][lane] of P d, P h cos, P h sin. */
INLINE void FN(add_pairs)(REAL *t, const REAL *pairs, const REAL *components, int n, int64_t stride, int G, int A, REAL *w) {
    REAL *sums = ROW(t, G + 2 * A + 2), s[MIXTURE_TILE] __attribute__((aligned(64))),
         c[MIXTURE_TILE] __attribute__((aligned(64)));
#pragma GCC unroll 3
    for (int g = 0; g < G; g++) {
        memcpy(s, ROW(sums, g), sizeof s);
        for (int j = 0; j < n; j++) {
            const REAL *p = ROW(pairs, j), *d = ROW(pairs, BLOCK_J + j * G + g);
            for (int l = 0; l < MIXTURE_TILE; l++) s[l] += p[l] * d[l];
            FN(fold)(w + ((1 + g) * BLOCK_J + j) * LANES, p, d);
        }
        memcpy(ROW(sums, g), s, sizeof s);
    }
#pragma GCC unroll 2
    for (int i = 0; i < A; i++) {
        memcpy(c, ROW(sums, G + i), sizeof c);
        memcpy(s, ROW(sums, G + A + i), sizeof s);
        for (int j = 0; j < n; j++) {
            const REAL *h = ROW(pairs, BLOCK_J * (1 + G) + j * A + i);
            REAL kc = components[(1 + G + i) * stride + j], ks = components[(1 + G + A + i) * stride + j];
            for (int l = 0; l < MIXTURE_TILE; l++) c[l] += h[l] * kc;
            for (int l = 0; l < MIXTURE_TILE; l++) s[l] += h[l] * ks;
            FN(fold)(w + ((1 + G + i) * BLOCK_J + j) * LANES, h, ROW(t, G + i));
            FN(fold)(w + ((1 + G + A + i) * BLOCK_J + j) * LANES, h, ROW(t, G + A + i));
        }
        memcpy(ROW(sums, G + i), c, sizeof c);
        memcpy(ROW(sums, G + A + i), s, sizeof s);
    }
}

/* Sums of 16 lanes, n rows of them, by halves. The barrier keeps gcc from vectorising over rows, which costs five times as
 * much. */
INLINE void FN(sum_lanes)(const REAL *w, int n, REAL *sum) {
    for (int r = 0; r < n; r++, w += LANES) {
        REAL a[8], b[4];
        for (int l = 0; l < 8; l++) a[l] = w[l] + w[l + 8];
        for (int l = 0; l < 4; l++) b[l] = a[l] + a[l + 4];
        sum[r] = (b[0] + b[2]) + (b[1] + b[3]);
        __asm__ volatile("" ::: "memory");
    }
}

/* The lanes of a block's component sums, added up and turned into gradients: scaled units become those of the state. */
INLINE void
FN(fold_block)(const MixtureRow *row, const REAL *components, int n, int64_t stride, int G, int A, REAL *w, int64_t j0,
               FN(Sums) out) {
    REAL s[1 + 2 * MIXTURE_MAX_D][BLOCK_J];
    FN(sum_lanes)(w, (1 + G + 2 * A) * BLOCK_J, s[0]);
    for (int j = 0; j < n; j++) out.weights[j0 + j] += s[0][j];
    for (int g = 0; g < G; g++) {
        double unit = row->scale[g] * (2 / LOG2E), square = 0;
        for (int j = 0; j < n; j++) {
            out.means[g * stride + j0 + j] += unit * s[1 + g][j];
            square += (double)components[(1 + g) * stride + j] * s[1 + g][j];
        }
        out.bandwidths[g] -= (2 / LOG2E) * square;
    }
    for (int i = 0; i < A; i++)
        for (int j = 0; j < n; j++) {
            double kc = components[(1 + G + i) * stride + j], ks = components[(1 + G + A + i) * stride + j];
            out.means[(G + i) * stride + j0 + j] += (kc * s[1 + G + i][j] + ks * s[1 + G + A + i][j]) / LOG2E;
        }
}

/* Queries of a tile and what forward left of them; those that are computed exactly, and padding, become 0 with gradient 0. */
INLINE void FN(load_tile)(const MixtureLogProb *p, int64_t b, int64_t i0, int64_t n, int G, int A, REAL *t) {
    const int F = G + 2 * A;
    const REAL *log2_sum = (const REAL *)p->log2_sum + b * p->M + i0, *grad = (const REAL *)p->grad + b * p->M + i0;
    REAL here[MIXTURE_TILE] = {0};
    FN(load_queries)((const REAL *)p->x + (b * p->M + i0) * (G + A), n, p->rows + b, G, A, t);
    for (int64_t l = 0; l < n; l++) here[l] = log2_sum[l] != INFINITY, ROW(t, F)[l] = log2_sum[l], ROW(t, F + 1)[l] = grad[l];
    for (int f = 0; f < F + 2; f++)
        for (int l = 0; l < MIXTURE_TILE; l++) ROW(t, f)[l] = here[l] != 0 ? ROW(t, f)[l] : 0;
    memset(ROW(t, F + 2), 0, sizeof(REAL) * F * MIXTURE_TILE);
}

/* Gradients of the tile's queries from their sums, and their part in the bandwidths' sums. */
INLINE void FN(finish_tile)(const MixtureLogProb *p, int64_t b, int64_t i0, int64_t n, int G, int A, const REAL *t,
                            FN(Sums) out) {
    const int F = G + 2 * A;
    const MixtureRow *row = p->rows + b;
    REAL *grad_x = p->grad_x ? (REAL *)p->grad_x + (b * p->M + i0) * (G + A) : 0;
    for (int g = 0; g < G; g++) {
        const REAL *q = ROW(t, g), *sum = ROW(t, F + 2 + g);
        REAL unit = (REAL)(-row->scale[g] * (2 / LOG2E));
        double square = 0;
#pragma omp simd reduction(+ : square)
        for (int l = 0; l < MIXTURE_TILE; l++) square += (double)q[l] * sum[l];
        for (int64_t l = 0; grad_x && l < n; l++) grad_x[l * (G + A) + g] = unit * sum[l];
        out.bandwidths[g] += (2 / LOG2E) * square;
    }
    for (int i = 0; i < A; i++) {
        const REAL *cosine = ROW(t, G + i), *sine = ROW(t, G + A + i), *sc = ROW(t, F + 2 + G + i),
                   *ss = ROW(t, F + 2 + G + A + i);
        double square = 0, r = row->scale[G + i];
#pragma omp simd reduction(+ : square)
        for (int l = 0; l < MIXTURE_TILE; l++) square += (double)sine[l] * sc[l] - (double)cosine[l] * ss[l];
        for (int64_t l = 0; grad_x && l < n; l++)
            grad_x[l * (G + A) + G + i] = -(cosine[l] * sc[l] + sine[l] * ss[l]) * (REAL)(1 / LOG2E);
        out.bandwidths[G + i] += square * 2 / (r * r);
    }
    double total = 0;
    for (int l = 0; l < MIXTURE_TILE; l++) total += ROW(t, F + 1)[l];
    out.bandwidths[G + A] += total;
}

/* Queries i0 .. i0 + n of a row, n <= 512: every pair once. */
INLINE void FN(super_tile)(const MixtureLogProb *p, int64_t b, int64_t i0, int64_t n, int G, int A, FN(Sums) out) {
    const int64_t stride = mixture_padded(p->N), size = FN(tile_size)(G, A), n_tiles = (n + MIXTURE_TILE - 1) / MIXTURE_TILE;
    const REAL *components = (const REAL *)p->components + b * stride * (1 + G + 2 * A);
    REAL tiles[SUPER * (4 * MIXTURE_MAX_D + 2) * MIXTURE_TILE] __attribute__((aligned(64)));
    REAL pairs[BLOCK_J * (1 + MIXTURE_MAX_D) * MIXTURE_TILE] __attribute__((aligned(64)));
    for (int64_t t = 0; t < n_tiles; t++) {
        int64_t first = t * MIXTURE_TILE, rest = n - first < MIXTURE_TILE ? n - first : MIXTURE_TILE;
        FN(load_tile)(p, b, i0 + first, rest, G, A, tiles + t * size);
    }
    for (int64_t j0 = 0; j0 < p->N; j0 += BLOCK_J) {
        int block = p->N - j0 < BLOCK_J ? (int)(p->N - j0) : BLOCK_J;
        REAL w[(1 + 2 * MIXTURE_MAX_D) * BLOCK_J * LANES] __attribute__((aligned(64)));
        memset(w, 0, sizeof(REAL) * (1 + G + 2 * A) * BLOCK_J * LANES);
        for (int64_t t = 0; t < n_tiles; t++) {
            FN(pairs_of_block)(tiles + t * size, components + j0, block, stride, G, A, pairs, w);
            FN(add_pairs)(tiles + t * size, pairs, components + j0, block, stride, G, A, w);
        }
        FN(fold_block)(p->rows + b, components + j0, block, stride, G, A, w, j0, out);
    }
    for (int64_t t = 0; t < n_tiles; t++) {
        int64_t first = t * MIXTURE_TILE, rest = n - first < MIXTURE_TILE ? n - first : MIXTURE_TILE;
        FN(finish_tile)(p, b, i0 + first, rest, G, A, tiles + t * size, out);
    }
}
