/* Loops over two_filter_number.h. Contract: two_filter_log_prob.h. */
#ifndef REAL
#include "two_filter_log_prob.h"
#define MDPS_FILE "two_filter_log_prob.c"
#include "for_each_real.h"
#else
#include "real_math.h"

#include "two_filter_number.h"

CLONES void FN(two_filter_log_prob)(int64_t begin, int64_t end, void *parameters) {
    const TwoFilterLogProb *p = parameters;
    const REAL *forward = p->log_forward, *backward = p->log_backward;
    REAL *q = p->log_proposal, log_mixing = (REAL)p->log_mixing, log_rest = (REAL)p->log_rest;
    for (int64_t i = begin; i < end; i++) q[i] = FN(log_proposal)(log_mixing + forward[i], log_rest + backward[i]);
}

CLONES void FN(two_filter_log_prob_backward)(int64_t begin, int64_t end, void *parameters) {
    const TwoFilterLogProb *p = parameters;
    const REAL *forward = p->log_forward, *backward = p->log_backward;
    const REAL *of_forward = p->grad_log_forward, *of_backward = p->grad_log_backward, *of_proposal = p->grad_log_proposal;
    REAL *to_forward = p->grad_forward, *to_backward = p->grad_backward;
    REAL log_mixing = (REAL)p->log_mixing, log_rest = (REAL)p->log_rest;
    for (int64_t i = begin; i < end; i++) {
        REAL f, b;
        FN(share)(log_mixing + forward[i], log_rest + backward[i], of_proposal[i], &f, &b);
        to_forward[i] = of_forward[i] + f;
        to_backward[i] = of_backward[i] + b;
    }
}

void FN(two_filter_add)(int64_t begin, int64_t end, void *parameters) {
    const TwoFilterLogProb *p = parameters;
    for (int64_t i = begin; i < end; i++) ((REAL *)p->grad_x)[i] += ((const REAL *)p->grad_x_backward)[i];
}
#endif
