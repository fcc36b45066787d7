/* Importance Weighted Sample Gradient: log-weights of B x M samples that were drawn from the mixture phi_0 itself.
 *
 * A sample z is a constant, its weight is m(z; phi) / m(z; phi_0): 1 at phi = phi_0, with gradient grad m(z; phi) / m(z; phi_0)
 * (paper, eq. of the IWSG). As a log-weight: 0, with the gradient of log m(z; phi). So forward writes zeros, and backward is
 * the forward and backward pass of mixture_log_prob (mixture_log_prob.h). Items are numbers. Cost: O(M) forward, O(MN)
 * backward.
 */
#ifndef MDPS_IWSG_LOG_WEIGHTS_H
#define MDPS_IWSG_LOG_WEIGHTS_H
#include <stdint.h>

#include "cuda_launch.h"

typedef struct {
    void *log_weights; /* (B, M) */
} IwsgLogWeights;

void iwsg_log_weights_f32(int64_t begin, int64_t end, void *parameters);
void iwsg_log_weights_f64(int64_t begin, int64_t end, void *parameters);
LAUNCHER int iwsg_log_weights_cuda(const void *parameters, int64_t n, int is_double, void *stream);
#endif
