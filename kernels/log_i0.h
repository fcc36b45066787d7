/* Logarithm of the modified Bessel function of order 0, number by number: log I0(|k|).
 *
 *   concentration (B)  any real numbers; the sign does not matter
 *   log_i0        (B)  0 at 0, k^2 / 4 beside it, |k| - log(2 pi |k|) / 2 far out
 *
 * The gradient is A(k) = I1(k) / I0(k), which has the sign of k. NaN stays where it is. Items are numbers; computed in double
 * for both types. Cost: a polynomial and two logarithms a number forward, a polynomial and a division backward.
 */
#ifndef MDPS_LOG_I0_H
#define MDPS_LOG_I0_H
#include <stdint.h>

#include "cuda_launch.h"

typedef struct {
    const void *concentration;
    void *log_i0;
    const void *grad_log_i0;  /* backward */
    void *grad_concentration; /* backward */
} LogI0;

void log_i0_f32(int64_t begin, int64_t end, void *parameters);
void log_i0_f64(int64_t begin, int64_t end, void *parameters);
void log_i0_backward_f32(int64_t begin, int64_t end, void *parameters);
void log_i0_backward_f64(int64_t begin, int64_t end, void *parameters);
LAUNCHER int log_i0_cuda(const void *parameters, int64_t n, int is_double, void *stream);
LAUNCHER int log_i0_backward_cuda(const void *parameters, int64_t n, int is_double, void *stream);
#endif
