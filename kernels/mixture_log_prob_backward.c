/* Gradients of mixture log-densities. Contract and formulas: mixture_log_prob.h; tiles: mixture_tile_backward.h.
 *
 * Queries that forward computed exactly are computed exactly again, one by one in double. Sums over a chunk of queries are in
 * double and in a fixed order, whatever the number of threads; chunks are added up in order.
 */
#ifndef REAL
#include "bessel.h"
#include "mixture_log_prob.h"
#include <stdbool.h>
#define MDPS_FILE "mixture_log_prob_backward.c"
#include "for_each_real.h"
#else
#include "mixture_tile_backward.h"

/* One query in double, its sum computed again. */
INLINE void FN(exact_query_backward)(const MixtureLogProb *p, int64_t b, int64_t i, const MixtureRow *row, int G, int A,
                                     FN(Sums) out) {
    const int D = G + A;
    const int64_t stride = mixture_padded(p->N);
    const REAL *x = (const REAL *)p->x + (b * p->M + i) * D;
    double grad = ((const REAL *)p->grad)[b * p->M + i], top, sum, at_x[MIXTURE_MAX_D] = {0};
    FN(Block) k;
    FN(exact_sum)(p, b, row, x, G, A, &k, &top, &sum);
    bool dead = top == -INFINITY && sum == 0;
    for (int64_t j0 = 0; j0 < p->N && !dead; j0 += MIXTURE_BLOCK) {
        int64_t n = p->N - j0 < MIXTURE_BLOCK ? p->N - j0 : MIXTURE_BLOCK;
        if (p->N > MIXTURE_BLOCK) FN(exact_block)(p, b, row, x, j0, n, G, A, &k); /* else exact_sum left it */
        for (int64_t l = 0; l < n; l++) {
            k.a[l] = grad / sum * exp2_real_f64(k.a[l] - top);
            out.weights[j0 + l] += k.a[l];
        }
        for (int g = 0; g < D; g++) {
            double *means = out.means + g * stride + j0, *d = k.d[g], squares = 0, to_x = 0, r = row->scale[g];
            double unit = g < G ? r / sqrt(0.5 * LOG2E) : r * r / LOG2E;
#pragma omp simd reduction(+ : squares, to_x)
            for (int64_t l = 0; l < n; l++) {
                double square = 1 - d[l] * d[l], slope = k.a[l] * unit * (g < G ? d[l] : d[l] * sqrt(square < 0 ? 0 : square));
                squares += k.a[l] * d[l] * d[l];
                to_x += slope;
                means[l] += slope;
            }
            at_x[g] -= to_x;
            out.bandwidths[g] += g < G ? squares : 2 * squares;
        }
    }
    out.bandwidths[D] += dead ? 0 : sum == sum ? grad : sum;
    for (int g = 0; p->grad_x && g < D; g++) ((REAL *)p->grad_x)[(b * p->M + i) * D + g] = (REAL)at_x[g];
}

/* Queries first .. last of a row. */
INLINE void FN(queries)(const MixtureLogProb *p, int64_t b, const MixtureRow *row, const REAL *components, int64_t first,
                    int64_t last, int G, int A, REAL *w, FN(Sums) out) {
    const REAL *log2_sum = (const REAL *)p->log2_sum + b * p->M;
    int few = row->exactly;
    memset(out.weights, 0, sizeof(double) * mixture_sums(p));
    for (int64_t i0 = first; i0 < last && !row->exactly; i0 += MIXTURE_SUPER)
        FN(super_tile)(p, b, row, components, i0, last - i0 < MIXTURE_SUPER ? last - i0 : MIXTURE_SUPER, G, A, w, out);
    for (int64_t i = first; i < last; i++) few |= log2_sum[i] == INFINITY;
    for (int64_t i = first; i < last && few; i++)
        if (row->exactly || log2_sum[i] == INFINITY) FN(exact_query_backward)(p, b, i, row, G, A, out);
}

INLINE FN(Sums) FN(sums_of)(const MixtureLogProb *p, int64_t b, int64_t chunk) {
    return FN(sums_at)(p, p->sums + (b * mixture_chunks(p) + chunk) * mixture_sums(p));
}

/* A row's sums become gradients. */
INLINE void FN(store)(const MixtureLogProb *p, int64_t b, FN(Sums) total) {
    const int D = p->G + p->A;
    const int64_t N = p->N, stride = mixture_padded(N);
    REAL *grad_means = (REAL *)p->grad_means + b * N * D, *grad_weights = (REAL *)p->grad_log_weights + b * N;
    for (int64_t j = 0; j < N; j++) grad_weights[j] = (REAL)total.weights[j];
    for (int d = 0; d < D; d++)
        for (int64_t j = 0; j < N; j++) grad_means[j * D + d] = (REAL)total.means[d * stride + j];
}

/* Chunks of rows that are prepared, or short rows. */
INLINE void FN(chunks)(const MixtureLogProb *p, int64_t begin, int64_t end, int G, int A) {
    const bool is_short = mixture_is_short(p);
    const int64_t n_chunks = is_short ? 1 : mixture_chunks(p), size = mixture_padded(p->N) * (1 + G + 2 * A);
    MixtureRow own;
    REAL own_components[(1 + 2 * MIXTURE_MAX_D) * MIXTURE_SHORT] __attribute__((aligned(64)));
    double own_sums[(1 + MIXTURE_MAX_D) * (MIXTURE_SHORT + 1)] __attribute__((aligned(64)));
    REAL w[(1 + 2 * MIXTURE_MAX_D) * CHUNK * LANES] __attribute__((aligned(64))); /* zeros between uses */
    memset(w, 0, sizeof(REAL) * (1 + G + 2 * A) * CHUNK * LANES);
    for (int64_t item = begin; item < end; item++) {
        const int64_t b = item / n_chunks, chunk = item % n_chunks, first = chunk * mixture_chunk(p);
        const int64_t last = first + mixture_chunk(p) < p->M ? first + mixture_chunk(p) : p->M;
        const FN(Sums) out = is_short ? FN(sums_at)(p, own_sums) : FN(sums_of)(p, b, chunk);
        if (is_short) FN(mixture_prepare_row)(p, b, b > begin && !p->bandwidth_stride, &own, own_components);
        FN(queries)(p, b, is_short ? &own : p->rows + b, is_short ? own_components : (const REAL *)p->components + b * size, first,
                last, G, A, w, out);
        if (is_short) {
            FN(store)(p, b, out);
            memcpy(p->sums + b * (G + A + 1), out.bandwidths, sizeof(double) * (G + A + 1));
        }
    }
}

CLONES void FN(mixture_backward_pairs)(int64_t begin, int64_t end, void *parameters) {
    const MixtureLogProb *p = parameters;
    if (p->G == 2 && p->A == 1) FN(chunks)(p, begin, end, 2, 1);
    else if (!IS_DOUBLE && p->G == 2 && p->A == 0) FN(chunks)(p, begin, end, 2, 0);
    else if (!IS_DOUBLE && p->G == 3 && p->A == 0) FN(chunks)(p, begin, end, 3, 0);
    else FN(chunks)(p, begin, end, p->G, p->A);
}

void FN(mixture_backward_reduce)(int64_t begin, int64_t end, void *parameters) {
    const MixtureLogProb *p = parameters;
    for (int64_t b = begin; b < end; b++) {
        FN(Sums) total = FN(sums_of)(p, b, 0);
        for (int64_t chunk = 1; chunk < mixture_chunks(p); chunk++) {
            FN(Sums) part = FN(sums_of)(p, b, chunk);
            for (int64_t i = 0; i < mixture_sums(p); i++) total.weights[i] += part.weights[i];
        }
        FN(store)(p, b, total);
    }
}

/* d / d beta of a row from its sums. */
static double FN(bandwidth_gradient)(const MixtureLogProb *p, int d, double beta, double squares, double total) {
    if (d < p->G) return (squares - total) / beta;
    return 2 / (beta * beta * beta) * (squares - one_minus_bessel_ratio(1 / (beta * beta)) * total);
}

void FN(mixture_backward_share)(int64_t begin, int64_t end, void *parameters) {
    const MixtureLogProb *p = parameters;
    const int D = p->G + p->A;
    const REAL *bandwidths = p->bandwidths;
    REAL *grad = p->grad_bandwidths;
    (void)begin, (void)end;
    for (int d = 0; d < D; d++) {
        double squares = 0, total = 0;
        for (int64_t b = 0; b < p->B; b++) {
            const double *sums = mixture_is_short(p) ? p->sums + b * (D + 1) : FN(sums_of)(p, b, 0).bandwidths;
            double more = sums[d], more_total = sums[D];
            if (p->bandwidth_stride) grad[b * D + d] = (REAL)FN(bandwidth_gradient)(p, d, bandwidths[b * D + d], more, more_total);
            squares += more, total += more_total;
        }
        if (!p->bandwidth_stride) grad[d] = (REAL)FN(bandwidth_gradient)(p, d, bandwidths[d], squares, total);
    }
}
#endif
