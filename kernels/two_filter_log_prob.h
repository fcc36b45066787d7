/* The two-filter proposal q = mixing m_f + (1 - mixing) m_b of the smoother (paper, eq. of q(x_t)) from the two log-densities.
 *
 *   log_forward, log_backward, log_proposal (B, M);  0 <= mixing <= 1
 *
 * Backward: q's gradient is shared out by the parts of q, r = mixing m_f / q and 1 - r, 0 where q = 0; the gradients to the
 * mixtures and to x are then those of mixture_log_prob. Items are numbers. Cost: two exponentials and a logarithm a number.
 */
#ifndef MDPS_TWO_FILTER_LOG_PROB_H
#define MDPS_TWO_FILTER_LOG_PROB_H
#include <math.h>
#include <stdint.h>

#include "clones.h"
#include "cuda_launch.h"

typedef struct {
    double log_mixing, log_rest; /* of mixing and 1 - mixing */
    const void *log_forward, *log_backward;
    void *log_proposal;
    const void *grad_log_forward, *grad_log_backward, *grad_log_proposal; /* backward: as they came, (B, M) */
    void *grad_forward, *grad_backward;                                   /* backward: what each mixture gets, (B, M) */
    void *grad_x;                                                         /* two_filter_add: grad_x += grad_x_backward */
    const void *grad_x_backward;
} TwoFilterLogProb;

INLINE void two_filter_mix(TwoFilterLogProb *p, double mixing) {
    p->log_mixing = log(mixing);
    p->log_rest = log1p(-mixing);
}

void two_filter_log_prob_f32(int64_t begin, int64_t end, void *parameters);
void two_filter_log_prob_f64(int64_t begin, int64_t end, void *parameters);
void two_filter_log_prob_backward_f32(int64_t begin, int64_t end, void *parameters);
void two_filter_log_prob_backward_f64(int64_t begin, int64_t end, void *parameters);
void two_filter_add_f32(int64_t begin, int64_t end, void *parameters);
void two_filter_add_f64(int64_t begin, int64_t end, void *parameters);
LAUNCHER int two_filter_log_prob_cuda(const void *parameters, int64_t n, int is_double, void *stream);
LAUNCHER int two_filter_log_prob_backward_cuda(const void *parameters, int64_t n, int is_double, void *stream);
LAUNCHER int two_filter_add_cuda(const void *parameters, int64_t n, int is_double, void *stream);
#endif
