/* A thread a number; the formulas are in two_filter_number.h. Contract: two_filter_log_prob.h. */
#ifndef REAL
#include "two_filter_log_prob.h"

#include "cuda_block.cuh"
#define MDPS_FILE "two_filter_log_prob.cu"
#include "for_each_real.h"

int two_filter_log_prob_cuda(const void *parameters, int64_t n, int is_double, void *stream) {
    return launch_numbers(is_double ? forward_f64 : forward_f32, parameters, n, stream);
}

int two_filter_log_prob_backward_cuda(const void *parameters, int64_t n, int is_double, void *stream) {
    return launch_numbers(is_double ? backward_f64 : backward_f32, parameters, n, stream);
}

int two_filter_add_cuda(const void *parameters, int64_t n, int is_double, void *stream) {
    return launch_numbers(is_double ? add_f64 : add_f32, parameters, n, stream);
}
#else
#include "real_math.h"

#include "two_filter_number.h"

static __global__ void FN(forward)(Numbers<TwoFilterLogProb> numbers) {
    const TwoFilterLogProb &p = numbers.p;
    const int64_t i = thread_of_grid();
    if (i >= numbers.n) return;
    REAL f = (REAL)p.log_mixing + ((const REAL *)p.log_forward)[i], b = (REAL)p.log_rest + ((const REAL *)p.log_backward)[i];
    ((REAL *)p.log_proposal)[i] = FN(log_proposal)(f, b);
}

static __global__ void FN(backward)(Numbers<TwoFilterLogProb> numbers) {
    const TwoFilterLogProb &p = numbers.p;
    const int64_t i = thread_of_grid();
    if (i >= numbers.n) return;
    REAL f = (REAL)p.log_mixing + ((const REAL *)p.log_forward)[i], b = (REAL)p.log_rest + ((const REAL *)p.log_backward)[i];
    REAL to_forward, to_backward;
    FN(share)(f, b, ((const REAL *)p.grad_log_proposal)[i], &to_forward, &to_backward);
    ((REAL *)p.grad_forward)[i] = ((const REAL *)p.grad_log_forward)[i] + to_forward;
    ((REAL *)p.grad_backward)[i] = ((const REAL *)p.grad_log_backward)[i] + to_backward;
}

static __global__ void FN(add)(Numbers<TwoFilterLogProb> numbers) {
    const int64_t i = thread_of_grid();
    if (i < numbers.n) ((REAL *)numbers.p.grad_x)[i] += ((const REAL *)numbers.p.grad_x_backward)[i];
}
#endif
