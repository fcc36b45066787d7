/* What the operators on small networks share: taking the arguments, and running the passes of small_network. */
#ifndef MDPS_NETWORK_H
#define MDPS_NETWORK_H
#include "operator.h"
#include "small_network.h"

typedef struct {
    Tensor x, extra, condition, weights;
} Network;

typedef struct {
    Tensor x, extra, condition, weights;
} NetworkGradients;

/* x (B, N, C), extra (B, N, E) or none, condition (B, K) or none, weights (P) or (R, P) and layers, from five places of the
 * stack. p has its form (small_network.h), or is all 0; grad_y makes it ready for the backward pass. Without layers that fit
 * each other p->n_layers is 0. */
Network take_network(Call *call, const StableIValue *values, const char *x_name, SmallNetwork *p, const Tensor *grad_y);
/* The second half of it, of tensors that fit each other; p has E and K too. Other inputs of these sizes may follow. */
void network_parameters(Call *call, const Network *network, const char *x_name, StableIValue layers, SmallNetwork *p,
                        const Tensor *grad_y);
static inline void network_inputs(const Network *a, SmallNetwork *p) {
    p->x = a->x.data, p->extra = a->extra.data, p->condition = a->condition.data, p->weights = a->weights.data;
}
/* The last layer returns `out` shares in [0, 1]. */
void expect_shares(Call *call, const SmallNetwork *p, int out);
/* Fills p->y; `cuda` does so on the GPU. */
void network_forward(Call *call, const Network *network, SmallNetwork *p, Launcher *cuda);
/* New gradients from p->grad_y. wanted: 1 for x + 2 for extra; one that is not wanted, or whose argument is absent, is empty.
 */
NetworkGradients network_backward(Call *call, const Network *network, SmallNetwork *p, int64_t wanted, Launcher *cuda);
#endif
