/* Schema and registration of weigh_poses. Contract: kernels/weigh_poses.h. */
#include "weigh_poses.h"

#include "network.h"

/* poses, extra, condition, weights and layers from stack[0] on, then minimum and least_extra. */
static Network take_arguments(Call *call, StableIValue *stack, SmallNetwork *p, const Tensor *grad) {
    const double minimum = take_float(stack[5]), least_extra = take_float(stack[6]);
    weigh_poses_form(p, minimum, least_extra);
    Network a = take_network(call, stack, "poses", p, grad);
    expect_shares(call, p, 1);
    expect(call, minimum >= 1e-30 && minimum < 1, "minimum: expected a number in [1e-30, 1), got %g", minimum);
    expect(call, least_extra == least_extra, "least_extra: expected a number, got %g", least_extra);
    return a;
}

static void forward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "weigh_poses"};
    SmallNetwork p = {0};
    Network a = take_arguments(&call, stack, &p, NULL);
    Tensor log_weights = new_tensor(&call, &a.x, 2, a.x.size);
    p.y = log_weights.data;
    network_forward(&call, &a, &p, weigh_poses_forward_cuda);
    finish(&call, stack, 1, (Tensor[]){log_weights});
}
OPERATOR(weigh_poses,
         "weigh_poses(Tensor poses, Tensor? extra, Tensor? condition, Tensor weights, int[] layers, float minimum, "
         "float least_extra) -> Tensor",
         forward)

/* wanted: see network_backward. */
static void backward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "weigh_poses_backward"};
    SmallNetwork p = {0};
    Tensor grad = take_tensor(&call, stack[0], "grad", 2);
    Network a = take_arguments(&call, stack + 1, &p, &grad);
    expect_like(&call, &grad, "grad", &a.x, "poses");
    expect_size(&call, &grad, "grad", 2, a.x.size);
    NetworkGradients grads = network_backward(&call, &a, &p, take_int(stack[8]), weigh_poses_backward_cuda);
    finish(&call, stack, 4, (Tensor[]){grads.x, grads.extra, grads.condition, grads.weights});
}
OPERATOR(weigh_poses_backward,
         "weigh_poses_backward(Tensor grad, Tensor poses, Tensor? extra, Tensor? condition, Tensor weights, int[] layers, "
         "float minimum, float least_extra, int wanted) -> (Tensor, Tensor, Tensor, Tensor)",
         backward)
