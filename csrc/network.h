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

/* What an operator calls them, for the errors. */
typedef struct {
    const char *x, *extra, *condition, *weights, *layers;
} NetworkNames;

/* x (B, N, C), extra (B, N, E) or none, condition (B, K) or none, weights (P) or (R, P) and layers, from five places of the
 * stack. p has its form (small_network.h), or is all 0, and gets ready to run; grad_y: backward too. Without layers that fit
 * each other p->n_layers is 0. */
Network take_network(Call *call, const StableIValue *values, const char *x_name, SmallNetwork *p, const Tensor *grad_y);
/* Completes p, which has its form, E and K, with layers, sizes and pointers, but does not make it ready. The sizes of x, extra
 * and condition fit each other. grad_y: as above. */
void network_parameters(Call *call, const Network *network, const NetworkNames *names, StableIValue layers, SmallNetwork *p,
                        const Tensor *grad_y);
/* Gives p, which network_parameters has completed, the inputs of this network, which may have fewer rows and sets. */
void network_layout(const Network *network, SmallNetwork *p);
/* Makes p ready: scratch memory, and the weights as the passes read them. */
void network_prepare(Call *call, const Network *network, SmallNetwork *p);
/* R. */
static inline int64_t network_sets(const Network *a) { return a->weights.dim == 2 ? a->weights.size[0] : 1; }
/* Points p at other inputs of the same sizes, of the same weights. */
static inline void network_inputs(const Network *a, SmallNetwork *p) {
    p->x = a->x.data, p->extra = a->extra.data, p->condition = a->condition.data, p->weights = a->weights.data;
}
/* Between 1 and NETWORK_WIDTH columns. */
void expect_width(Call *call, const char *name, int64_t width);
/* The last layer returns `out` shares in [0, 1]. */
void expect_shares(Call *call, const SmallNetwork *p, int out);
/* Fills p->y; `cuda` does so on the GPU. */
void network_forward(Call *call, const Network *network, SmallNetwork *p, Launcher *cuda);
/* New gradients from p->grad_y. wanted: 1 for x + 2 for extra; one that is not wanted, or whose argument is absent, is empty.
 */
NetworkGradients network_backward(Call *call, const Network *network, SmallNetwork *p, int64_t wanted, Launcher *cuda);
#endif
