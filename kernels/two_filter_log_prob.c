/* log q by the larger of its two parts. Contract: two_filter_log_prob.h. */
#ifndef REAL
#include "two_filter_log_prob.h"
#define MDPS_FILE "two_filter_log_prob.c"
#include "for_each_real.h"
#else
#include "real_math.h"

CLONES void FN(two_filter_log_prob)(int64_t begin, int64_t end, void *parameters) {
    const TwoFilterLogProb *p = parameters;
    const REAL *forward = p->log_forward, *backward = p->log_backward;
    REAL *q = p->log_proposal, log_mixing = (REAL)log(p->mixing), log_rest = (REAL)log1p(-p->mixing);
    for (int64_t i = begin; i < end; i++) {
        REAL f = log_mixing + forward[i], b = log_rest + backward[i];
        REAL high = f > b ? f : b, low = f > b ? b : f;
        REAL part = FN(exp2_real)((low - high) * (REAL)LOG2E);
        REAL sum = low == -INFINITY ? high : high + FN(log2_less)(1 + part, 0) * (REAL)LN2;
        q[i] = f == f && b == b ? sum : f + b; /* log2_less makes a number of a NaN */
    }
}

CLONES void FN(two_filter_log_prob_backward)(int64_t begin, int64_t end, void *parameters) {
    const TwoFilterLogProb *p = parameters;
    const REAL *forward = p->log_forward, *backward = p->log_backward;
    const REAL *of_forward = p->grad_log_forward, *of_backward = p->grad_log_backward, *of_proposal = p->grad_log_proposal;
    REAL *to_forward = p->grad_forward, *to_backward = p->grad_backward;
    REAL log_mixing = (REAL)log(p->mixing), log_rest = (REAL)log1p(-p->mixing);
    for (int64_t i = begin; i < end; i++) {
        REAL f = log_mixing + forward[i], b = log_rest + backward[i];
        bool forward_is_high = f > b, dead = f == -INFINITY && b == -INFINITY;
        REAL part = FN(exp2_real)((forward_is_high ? b - f : f - b) * (REAL)LOG2E);
        REAL high = 1 / (1 + part), low = part * high, g = of_proposal[i];
        to_forward[i] = of_forward[i] + (dead ? 0 : g * (forward_is_high ? high : low));
        to_backward[i] = of_backward[i] + (dead ? 0 : g * (forward_is_high ? low : high));
    }
}

void FN(two_filter_add)(int64_t begin, int64_t end, void *parameters) {
    const TwoFilterLogProb *p = parameters;
    for (int64_t i = begin; i < end; i++) ((REAL *)p->grad_x)[i] += ((const REAL *)p->grad_x_backward)[i];
}
#endif
