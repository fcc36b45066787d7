/* A thread a number, in double as on the CPU, the Bessel part for each. Contract: von_mises_log_prob.h. */
#ifndef REAL
#include "von_mises_log_prob.h"

#include "bessel.h"
#include "cuda_block.cuh"
#define MDPS_FILE "von_mises_log_prob.cu"
#include "for_each_real.h"

int von_mises_log_prob_cuda(const void *parameters, int64_t n, int is_double, void *stream) {
    return launch_numbers(is_double ? forward_f64 : forward_f32, parameters, n, stream);
}

int von_mises_log_prob_backward_cuda(const void *parameters, int64_t n, int is_double, void *stream) {
    return launch_numbers(is_double ? backward_f64 : backward_f32, parameters, n, stream);
}
#else
#include "real_math.h"

/* Number i: its concentration, and its angle's difference from the mean as turns. */
DEVICE double FN(concentration)(const VonMisesLogProb &p, int64_t i) {
    REAL k = ((const REAL *)p.concentration)[i];
    return k >= 0 ? (double)k : (double)NAN;
}
DEVICE double FN(difference)(const VonMisesLogProb &p, int64_t i) {
    return turns_f64((double)((const REAL *)p.x)[i] - (double)((const REAL *)p.mean)[i]);
}

static __global__ void FN(forward)(Numbers<VonMisesLogProb> numbers) {
    const VonMisesLogProb &p = numbers.p;
    const int64_t i = thread_of_grid();
    if (i >= numbers.n) return;
    double k = FN(concentration)(p, i), u = FN(difference)(p, i), s = u * sinpi_over_f64(u * u);
    ((REAL *)p.log_prob)[i] = (REAL)(-log_i0_scaled(k) - 1.8378770664093455 /* log(2 pi) */ - 2 * k * s * s);
}

static __global__ void FN(backward)(Numbers<VonMisesLogProb> numbers) {
    const VonMisesLogProb &p = numbers.p;
    const int64_t i = thread_of_grid();
    if (i >= numbers.n) return;
    double k = FN(concentration)(p, i), u = FN(difference)(p, i), grad = (double)((const REAL *)p.grad_log_prob)[i];
    double s = u * sinpi_over_f64(u * u), c = cospi_poly_f64(u * u), g = 2 * k * s * c * grad;
    ((REAL *)p.grad_x)[i] = (REAL)-g;
    ((REAL *)p.grad_mean)[i] = (REAL)g;
    ((REAL *)p.grad_concentration)[i] = (REAL)((one_minus_bessel_ratio(k) - 2 * s * s) * grad);
}
#endif
