/* Log-density of the von Mises distribution, number by number:
 *
 *     log p(x) = k cos(x - mean) - log(2 pi I0(k)) = -2 k sin^2((x - mean) / 2) - log(2 pi) - log(e^-k I0(k))
 *
 *   x             (B)  radians, wrapped or not
 *   mean          (B)  radians, wrapped or not
 *   concentration (B)  k >= 0, finite; 0 is uniform on the circle
 *   log_prob      (B)
 *
 * Gradients: -k sin(x - mean) to x, its negative to mean, (1 - A(k)) - 2 sin^2((x - mean) / 2) to k, with A = I1 / I0.
 * A negative, infinite or NaN concentration, and an infinite or NaN angle, make their own number NaN.
 * Items are numbers; computed in double for both types. Cost: a sine a number, and the Bessel part (bessel.h) once for each
 * run of equal concentrations.
 */
#ifndef MDPS_VON_MISES_LOG_PROB_H
#define MDPS_VON_MISES_LOG_PROB_H
#include <stdint.h>

#include "cuda_launch.h"

typedef struct {
    const void *x, *mean, *concentration;
    void *log_prob;
    const void *grad_log_prob;                     /* backward */
    void *grad_x, *grad_mean, *grad_concentration; /* backward */
} VonMisesLogProb;

void von_mises_log_prob_f32(int64_t begin, int64_t end, void *parameters);
void von_mises_log_prob_f64(int64_t begin, int64_t end, void *parameters);
void von_mises_log_prob_backward_f32(int64_t begin, int64_t end, void *parameters);
void von_mises_log_prob_backward_f64(int64_t begin, int64_t end, void *parameters);
LAUNCHER int von_mises_log_prob_cuda(const void *parameters, int64_t n, int is_double, void *stream);
LAUNCHER int von_mises_log_prob_backward_cuda(const void *parameters, int64_t n, int is_double, void *stream);
#endif
