/* A thread a number, bessel.h in double as on the CPU. Contract: log_i0.h. */
#ifndef REAL
#include "log_i0.h"

#include "bessel.h"
#include "cuda_block.cuh"
#define MDPS_FILE "log_i0.cu"
#include "for_each_real.h"

int log_i0_cuda(const void *parameters, int64_t n, int is_double, void *stream) {
    return launch_numbers(is_double ? forward_f64 : forward_f32, parameters, n, stream);
}

int log_i0_backward_cuda(const void *parameters, int64_t n, int is_double, void *stream) {
    return launch_numbers(is_double ? backward_f64 : backward_f32, parameters, n, stream);
}
#else

static __global__ void FN(forward)(Numbers<LogI0> numbers) {
    const LogI0 &p = numbers.p;
    const int64_t i = thread_of_grid();
    if (i >= numbers.n) return;
    ((REAL *)p.log_i0)[i] = (REAL)log_i0_plain(fabs((double)((const REAL *)p.concentration)[i]));
}

static __global__ void FN(backward)(Numbers<LogI0> numbers) {
    const LogI0 &p = numbers.p;
    const int64_t i = thread_of_grid();
    if (i >= numbers.n) return;
    double k = (double)((const REAL *)p.concentration)[i], ratio = copysign(bessel_ratio(fabs(k)), k);
    ((REAL *)p.grad_concentration)[i] = (REAL)(((const REAL *)p.grad_log_i0)[i] * ratio);
}
#endif
