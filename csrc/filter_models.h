/* The models of a Mixture Density Particle Filter over poses, as filter_poses and its derivative take them. */
#ifndef MDPS_FILTER_MODELS_H
#define MDPS_FILTER_MODELS_H
#include "mixture.h"
#include "network.h"

/* Of a schema: what take_filter_models takes. */
#define FILTER_MODELS                                                                                               \
    "Tensor bandwidths, Tensor codes, Tensor? noise, Tensor move_weights, int[] move_layers, Tensor scale, Tensor " \
    "weigh_weights, int[] weigh_layers, float minimum"

typedef struct {
    int64_t first, n;                /* rows [first, first + n) of the batch: a block, or all */
    Tensor bandwidths, codes, noise; /* (3) or (n, 3); (T, B, K); (T, B, N, E) or none */
    Network move, weigh;             /* of a step */
    SmallNetwork moves, weighs;
} FilterModels;

/* The models' rows of step t of x (T, B, ...). */
static inline Tensor rows_at(const FilterModels *m, const Tensor *x, int64_t t) {
    const Tensor y = item_of(x, t);
    return items_of(&y, m->first, m->n);
}

/* bandwidths, codes, noise, move_weights, move_layers, scale, weigh_weights, weigh_layers and minimum from nine places of the
 * stack; `states` (B, N, 3) are a step's. */
FilterModels take_filter_models(Call *call, const StableIValue *values, const Tensor *states, bool backward);
/* Models of rows [first, first + n), within a set of either network, or of all rows. Only such are ready to run. */
FilterModels models_of_rows(Call *call, const FilterModels *all, int64_t first, int64_t n);
/* Moves x (n, N, 3) to step t. */
void move_at(Call *call, FilterModels *m, int64_t t, const Tensor *x, const Tensor *moved);
/* Log-weights (n, N) of step t's states x. */
void weigh_at(Call *call, FilterModels *m, int64_t t, const Tensor *x, const Tensor *log_weights);
/* Their derivatives; what moves has none to x. */
NetworkGradients move_backward_at(Call *call, FilterModels *m, int64_t t, const Tensor *x, const Tensor *grad);
NetworkGradients weigh_backward_at(Call *call, FilterModels *m, int64_t t, const Tensor *x, const Tensor *grad);
#endif
