/* A step of filter_poses, forward and backward: which kernels run, in which order. */
#ifndef MDPS_FILTER_STEPS_H
#define MDPS_FILTER_STEPS_H
#include "filter_models.h"

enum { FILTER_GRAIN = 1 << 15 }; /* numbers that are worth a thread */

/* What T steps leave: states (T, B, N, 3); log-weights before and after the observations, and ancestors, (T, B, N); log_sum and
 * ess (T, B); what was drawn for the steps but the first, (T - 1, B, N, 3). */
typedef struct {
    Tensor states, predicted, posterior, ancestors, log_sum, ess, drawn;
} FilterSteps;

/* Gradients of the results, each of its size or missing, and sums over the steps of those of the arguments: of all rows, or,
 * where a step takes them, of n of them (filter_models.h). Between steps `state` (n, N, 3) and `weights` (n, N) are the
 * gradients of the step's states and posterior log-weights; in the end `state` is that of the first particles. `likelihood`
 * (n, N) is memory for a step, `zeros` (B) are zeros. */
typedef struct {
    Tensor states, predicted, posterior, log_sum, ess;
    Tensor state, weights, likelihood, zeros;
    Tensor bandwidths, codes, move_weights, weigh_weights;
} FilterGradients;

/* sum = a + b, of those that are there. */
void add_up(Call *call, Tensor sum, Tensor a, Tensor b);
/* Step t of the models' rows from the one before; seeds (T, B), `scratch` (n, N). */
void filter_step(Call *call, FilterModels *m, FilterSteps *s, int64_t t, const Tensor *seeds, int scheme,
                 const Tensor *scratch);
void filter_step_backward(Call *call, FilterModels *m, const FilterSteps *s, int64_t t, FilterGradients *g);
#endif
