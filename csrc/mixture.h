/* What the operators on mixtures share: taking a mixture's arguments, and running the kernels of mixture_log_prob. */
#ifndef MDPS_MIXTURE_H
#define MDPS_MIXTURE_H
#include "mixture_log_prob.h"
#include "seed.h"

typedef struct {
    Tensor means, log_weights, bandwidths;
} Mixture;

/* Means (B, N, D), log_weights (B, N), bandwidths (B, D) or (D) from three places of the stack, checked against x (B, M, D). */
Mixture take_mixture(Call *call, const StableIValue *values, const Tensor *x);
/* Those of `rows` rows are positive and finite; a GPU does not look. */
void expect_bandwidths(Call *call, const Tensor *bandwidths, int64_t rows);
/* The kernels' parameters, with scratch memory. */
MixtureLogProb mixture_parameters(Call *call, const Tensor *x, const Mixture *mixture, StableIValue n_angular);
/* Fills p->log_prob and p->log2_sum. */
void mixture_forward(Call *call, const Tensor *x, MixtureLogProb *p);
/* From p->grad and p->log2_sum to new gradients of the mixture (and p->grad_x unless NULL); `prepared` after mixture_forward.
 */
Mixture mixture_backward(Call *call, const Tensor *x, const Mixture *mixture, MixtureLogProb *p, bool prepared);
/* From `grad` (B, M) of the log-densities at constant x to new gradients of the mixture: both passes (iwsg_log_weights.h). */
Mixture iwsg_backward(Call *call, const Tensor *x, const Mixture *mixture, StableIValue n_angular, const Tensor *grad);
/* In csrc/mixture_resample.c: fills samples (B, M, D) and the ancestors of r, which resample_parameters has completed. */
void mixture_resample_rows(Call *call, const Mixture *mixture, int64_t n_angular, const Resample *r, const Tensor *samples);
#endif
