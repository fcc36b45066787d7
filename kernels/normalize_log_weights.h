/* Normalised log-weights of B rows of N particles: log_weights[b][n] - log_sum[b].
 *
 *   log_weights (B, N)  any real numbers; -inf is a dead particle
 *   normalized  (B, N)  sums to 1 after exp
 *   log_sum     (B)     log of the sum of the exponentials
 *   ess         (B)     effective sample size, (sum w)^2 / sum w^2, in [1, N]
 *
 * A row whose weights are all -inf has collapsed: normalized = -log N, log_sum = -inf, ess = N, gradient 0.
 * A NaN or +inf makes its own row NaN. Items are rows. Cost: N exponentials a row, forward and backward.
 *
 * This is the tutorial operator: CONTRIBUTING.md walks through its six files.
 */
#ifndef MDPS_NORMALIZE_LOG_WEIGHTS_H
#define MDPS_NORMALIZE_LOG_WEIGHTS_H
#include <stdint.h>

#include "clones.h"
#include "cuda_launch.h"

typedef struct {
    int64_t B, N;
    const void *log_weights;
    void *normalized, *log_sum, *ess;
    const void *grad_normalized, *grad_log_sum, *grad_ess; /* backward: (B, N), (B), (B) */
    void *grad_log_weights;                                /* backward: (B, N) */
    void *scratch;                                         /* CUDA: NORMALIZE_SCRATCH(B, N) bytes */
} NormalizeLogWeights;

/* CUDA: a row has one block, or up to 256 with three numbers each. */
enum { NORMALIZE_PART = 4096 };
INLINE int64_t normalize_parts(int64_t N) {
    int64_t parts = (N + NORMALIZE_PART - 1) / NORMALIZE_PART;
    return parts < 256 ? parts : 256;
}
/* CPU: rows that are worth a thread. */
INLINE int64_t normalize_grain(int64_t N) { return 1 + 16384 / (N + 1); }
#define NORMALIZE_SCRATCH(B, N) (normalize_parts(N) > 1 ? (B) * normalize_parts(N) * 3 * 8 : 0)

void normalize_log_weights_f32(int64_t begin, int64_t end, void *parameters);
void normalize_log_weights_f64(int64_t begin, int64_t end, void *parameters);
/* Needs normalized, log_sum and ess of the forward pass. */
void normalize_log_weights_backward_f32(int64_t begin, int64_t end, void *parameters);
void normalize_log_weights_backward_f64(int64_t begin, int64_t end, void *parameters);
LAUNCHER int normalize_log_weights_cuda(const void *parameters, int64_t n, int is_double, void *stream);
LAUNCHER int normalize_log_weights_backward_cuda(const void *parameters, int64_t n, int is_double, void *stream);
#endif
