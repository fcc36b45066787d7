/* Softmax statistics of a row in two passes: its largest log-weight, then the sums of w and w^2 relative to it.
 * Contract: normalize_log_weights.h. This file includes itself once for float and once for double (for_each_real.h). */
#ifndef REAL
#include "normalize_log_weights.h"
#define MDPS_FILE "normalize_log_weights.c"
#include "for_each_real.h"
#else
#include "real_math.h"

/* A collapsed row becomes uniform; a row whose only numbers are NaN and -inf becomes NaN. */
static void FN(collapse)(int64_t N, const REAL *l, REAL *normalized, REAL *log_sum, REAL *ess) {
    REAL sum = -INFINITY;
    for (int64_t n = 0; n < N; n++) sum += l[n];
    bool is_nan = sum != sum;
    for (int64_t n = 0; n < N; n++) normalized[n] = is_nan ? sum : -log((REAL)N);
    *log_sum = sum;
    *ess = is_nan ? sum : (REAL)N;
}

CLONES void FN(normalize_log_weights)(int64_t begin, int64_t end, void *parameters) {
    const NormalizeLogWeights *p = parameters;
    const int64_t N = p->N;
    for (int64_t b = begin; b < end; b++) {
        const REAL *l = (const REAL *)p->log_weights + b * N;
        REAL *normalized = (REAL *)p->normalized + b * N, *log_sum = (REAL *)p->log_sum + b, *ess = (REAL *)p->ess + b;
        REAL top = -INFINITY, sum = 0, sum_of_squares = 0;
#pragma omp simd reduction(max : top)
        for (int64_t n = 0; n < N; n++) top = l[n] > top ? l[n] : top;
        if (top == -INFINITY) {
            FN(collapse)(N, l, normalized, log_sum, ess);
            continue;
        }
#pragma omp simd reduction(+ : sum, sum_of_squares)
        for (int64_t n = 0; n < N; n++) {
            REAL w = FN(exp2_real)((l[n] - top) * (REAL)LOG2E);
            sum += w;
            sum_of_squares += w * w;
        }
        *log_sum = top + log(sum);
        *ess = sum * sum / sum_of_squares;
        REAL log_of_sum = log(sum);
        for (int64_t n = 0; n < N; n++) normalized[n] = (l[n] - top) - log_of_sum;
    }
}

/* With p = exp(normalized): d normalized_i / d l_j = [i = j] - p_j, d log_sum / d l_j = p_j, d ess / d l_j = 2 ess p_j (1 - ess
 * p_j). */
CLONES void FN(normalize_log_weights_backward)(int64_t begin, int64_t end, void *parameters) {
    const NormalizeLogWeights *p = parameters;
    const int64_t N = p->N;
    for (int64_t b = begin; b < end; b++) {
        const REAL *normalized = (const REAL *)p->normalized + b * N, *grad = (const REAL *)p->grad_normalized + b * N;
        REAL *grad_l = (REAL *)p->grad_log_weights + b * N;
        bool collapsed = ((const REAL *)p->log_sum)[b] == -INFINITY;
        REAL ess = ((const REAL *)p->ess)[b], grad_ess = 2 * ess * ((const REAL *)p->grad_ess)[b], sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t n = 0; n < N; n++) sum += grad[n];
        REAL rest = ((const REAL *)p->grad_log_sum)[b] - sum;
        for (int64_t n = 0; n < N; n++) {
            REAL w = FN(exp2_real)(normalized[n] * (REAL)LOG2E);
            REAL g = grad[n] + w * (rest + grad_ess * (1 - ess * w));
            grad_l[n] = collapsed ? 0 : g;
        }
    }
}
#endif
