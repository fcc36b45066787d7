/* The models of a Mixture Density Particle Filter over poses, as filter_poses and its derivative take them. */
#ifndef MDPS_FILTER_MODELS_H
#define MDPS_FILTER_MODELS_H
#include "mixture.h"
#include "network.h"

typedef struct {
    Tensor bandwidths, codes, noise; /* (3) or (B, 3); (T, B, K); (T, B, N, E) or none */
    Network move, weigh;             /* of a step */
    SmallNetwork moves, weighs;
} FilterModels;

/* bandwidths, codes, noise, move_weights, move_layers, scale, weigh_weights, weigh_layers and minimum from nine places of the
 * stack; `states` (B, N, 3) are a step's. */
FilterModels take_filter_models(Call *call, const StableIValue *values, const Tensor *states, bool backward);
/* Moves x (B, N, 3) to step t. */
void move_at(Call *call, FilterModels *m, int64_t t, const Tensor *x, const Tensor *moved);
/* Log-weights (B, N) of step t's states x. */
void weigh_at(Call *call, FilterModels *m, int64_t t, const Tensor *x, const Tensor *log_weights);
/* Their derivatives; what moves has none to x. */
NetworkGradients move_backward_at(Call *call, FilterModels *m, int64_t t, const Tensor *x, const Tensor *grad);
NetworkGradients weigh_backward_at(Call *call, FilterModels *m, int64_t t, const Tensor *x, const Tensor *grad);
#endif
