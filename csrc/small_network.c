/* Schema and registration of small_network. Contract: kernels/small_network.h. */
#include "small_network.h"

#include "network.h"

static void forward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "small_network"};
    SmallNetwork p = {0};
    Network a = take_network(&call, stack, "x", &p, NULL);
    Tensor y = new_tensor(&call, &a.x, 3, (int64_t[]){p.B, p.N, ok(&call) ? p.layer[p.n_layers - 1].out : 0});
    p.y = y.data;
    network_forward(&call, &a, &p, small_network_forward_cuda);
    finish(&call, stack, 1, (Tensor[]){y});
}
OPERATOR(small_network, "small_network(Tensor x, Tensor? extra, Tensor? condition, Tensor weights, int[] layers) -> Tensor",
         forward)

/* wanted: see network_backward. */
static void backward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "small_network_backward"};
    SmallNetwork p = {0};
    Tensor grad_y = take_tensor(&call, stack[0], "grad_y", 3);
    Network a = take_network(&call, stack + 1, "x", &p, &grad_y);
    expect_like(&call, &grad_y, "grad_y", &a.x, "x");
    expect_size(&call, &grad_y, "grad_y", 3, (int64_t[]){p.B, p.N, ok(&call) ? p.layer[p.n_layers - 1].out : 0});
    NetworkGradients grad = network_backward(&call, &a, &p, take_int(stack[6]), small_network_backward_cuda);
    finish(&call, stack, 4, (Tensor[]){grad.x, grad.extra, grad.condition, grad.weights});
}
OPERATOR(small_network_backward,
         "small_network_backward(Tensor grad_y, Tensor x, Tensor? extra, Tensor? condition, Tensor weights, int[] layers, "
         "int wanted) -> (Tensor, Tensor, Tensor, Tensor)",
         backward)
