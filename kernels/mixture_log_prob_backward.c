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
INLINE void FN(exact_query_backward)(const MixtureLogProb *p, int64_t b, int64_t i, int G, int A, FN(Sums) out) {
    const int D = G + A;
    const int64_t stride = mixture_padded(p->N);
    const REAL *x = (const REAL *)p->x + (b * p->M + i) * D;
    double grad = ((const REAL *)p->grad)[b * p->M + i], top, sum, at_x[MIXTURE_MAX_D] = {0};
    FN(Block) k;
    FN(exact_sum)(p, b, x, G, A, &k, &top, &sum);
    bool dead = top == -INFINITY && sum == 0;
    for (int64_t j0 = 0; j0 < p->N && !dead; j0 += MIXTURE_BLOCK) {
        int64_t n = p->N - j0 < MIXTURE_BLOCK ? p->N - j0 : MIXTURE_BLOCK;
        if (p->N > MIXTURE_BLOCK) FN(exact_block)(p, b, x, j0, n, G, A, &k); /* else exact_sum left it */
        for (int64_t l = 0; l < n; l++) {
            k.a[l] = grad / sum * exp2_real_f64(k.a[l] - top);
            out.weights[j0 + l] += k.a[l];
        }
        for (int g = 0; g < D; g++) {
            double *means = out.means + g * stride + j0, *d = k.d[g], squares = 0, to_x = 0, r = p->rows[b].scale[g];
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

INLINE void FN(chunks)(const MixtureLogProb *p, int64_t begin, int64_t end, int G, int A) {
    const int64_t n_chunks = mixture_chunks(p);
    for (int64_t item = begin; item < end; item++) {
        int64_t b = item / n_chunks, chunk = item % n_chunks, first = chunk * mixture_chunk(p);
        int64_t last = first + mixture_chunk(p) < p->M ? first + mixture_chunk(p) : p->M;
        FN(Sums) out = FN(sums_of)(p, b, chunk);
        memset(out.weights, 0, sizeof(double) * mixture_sums(p));
        for (int64_t i0 = first; i0 < last && !p->rows[b].exactly; i0 += SUPER * MIXTURE_TILE)
            FN(super_tile)(p, b, i0, last - i0 < SUPER * MIXTURE_TILE ? last - i0 : SUPER * MIXTURE_TILE, G, A, out);
        for (int64_t i = first; i < last; i++)
            if (((const REAL *)p->log2_sum)[b * p->M + i] == INFINITY) FN(exact_query_backward)(p, b, i, G, A, out);
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
    const int D = p->G + p->A;
    const int64_t N = p->N, stride = mixture_padded(N), n_chunks = mixture_chunks(p);
    for (int64_t b = begin; b < end; b++) {
        REAL *grad_means = (REAL *)p->grad_means + b * N * D, *grad_weights = (REAL *)p->grad_log_weights + b * N;
        FN(Sums) total = FN(sums_of)(p, b, 0);
        for (int64_t chunk = 1; chunk < n_chunks; chunk++) {
            FN(Sums) part = FN(sums_of)(p, b, chunk);
            for (int64_t i = 0; i < mixture_sums(p); i++) total.weights[i] += part.weights[i];
        }
        for (int64_t j = 0; j < N; j++) grad_weights[j] = (REAL)(n_chunks ? total.weights[j] : 0);
        for (int d = 0; d < D; d++)
            for (int64_t j = 0; j < N; j++) grad_means[j * D + d] = (REAL)(n_chunks ? total.means[d * stride + j] : 0);
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
            FN(Sums) s = FN(sums_of)(p, b, 0);
            double more = mixture_chunks(p) ? s.bandwidths[d] : 0, more_total = mixture_chunks(p) ? s.bandwidths[D] : 0;
            if (p->bandwidth_stride) grad[b * D + d] = (REAL)FN(bandwidth_gradient)(p, d, bandwidths[b * D + d], more, more_total);
            squares += more, total += more_total;
        }
        if (!p->bandwidth_stride) grad[d] = (REAL)FN(bandwidth_gradient)(p, d, bandwidths[d], squares, total);
    }
}
#endif
