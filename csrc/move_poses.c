/* Schema and registration of move_poses. Contract: kernels/move_poses.h. */
#include "move_poses.h"

#include "network.h"

/* poses, noise, no condition, weights and layers from stack[0] on, then scale. */
static Network take_arguments(Call *call, StableIValue *stack, SmallNetwork *p, const Tensor *grad_moved) {
    Tensor scale = take_tensor(call, stack[5], "scale", 1);
    move_poses_form(p, scale.data);
    Network a = take_network(call, stack, "poses", p, grad_moved);
    expect_shares(call, p, 4);
    expect_like(call, &scale, "scale", &a.x, "poses");
    expect_size(call, &scale, "scale", 1, (int64_t[]){4});
    return a;
}

static void forward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "move_poses"};
    SmallNetwork p = {0};
    Network a = take_arguments(&call, stack, &p, NULL);
    Tensor moved = new_tensor(&call, &a.x, 3, a.x.size);
    p.y = moved.data;
    network_forward(&call, &a, &p, move_poses_forward_cuda);
    finish(&call, stack, 1, (Tensor[]){moved});
}
OPERATOR(move_poses,
         "move_poses(Tensor poses, Tensor? noise, Tensor? condition, Tensor weights, int[] layers, Tensor scale) -> Tensor",
         forward)

/* wanted: see network_backward. */
static void backward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "move_poses_backward"};
    SmallNetwork p = {0};
    Tensor grad_moved = take_tensor(&call, stack[0], "grad_moved", 3);
    Network a = take_arguments(&call, stack + 1, &p, &grad_moved);
    expect_like(&call, &grad_moved, "grad_moved", &a.x, "poses");
    expect_size(&call, &grad_moved, "grad_moved", 3, a.x.size);
    NetworkGradients grad = network_backward(&call, &a, &p, take_int(stack[7]), move_poses_backward_cuda);
    finish(&call, stack, 4, (Tensor[]){grad.x, grad.extra, grad.condition, grad.weights});
}
OPERATOR(move_poses_backward,
         "move_poses_backward(Tensor grad_moved, Tensor poses, Tensor? noise, Tensor? condition, Tensor weights, int[] layers, "
         "Tensor scale, int wanted) -> (Tensor, Tensor, Tensor, Tensor)",
         backward)
