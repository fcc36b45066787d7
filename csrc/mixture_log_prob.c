/* Schema and registration of mixture_log_prob. Contract: kernels/mixture_log_prob.h. */
#include "mixture.h"

static void forward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "mixture_log_prob"};
    Tensor x = take_tensor(&call, stack[0], "x", 3);
    Mixture mixture = take_mixture(&call, stack + 1, &x);
    MixtureLogProb p = mixture_parameters(&call, &x, &mixture, stack[4]);
    Tensor log_prob = new_tensor(&call, &x, 2, x.size), log2_sum = new_tensor(&call, &x, 2, x.size);
    p.log_prob = log_prob.data, p.log2_sum = log2_sum.data;
    mixture_forward(&call, &x, &p);
    finish(&call, stack, 2, (Tensor[]){log_prob, log2_sum});
}
OPERATOR(mixture_log_prob,
         "mixture_log_prob(Tensor x, Tensor means, Tensor log_weights, Tensor bandwidths, int n_angular) -> (Tensor, Tensor)",
         forward)

static void backward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "mixture_log_prob_backward"};
    Tensor grad = take_tensor(&call, stack[0], "grad", 2);
    Tensor x = take_tensor(&call, stack[1], "x", 3);
    Mixture mixture = take_mixture(&call, stack + 2, &x);
    Tensor log2_sum = take_tensor(&call, stack[5], "log2_sum", 2);
    expect_like(&call, &grad, "grad", &x, "x");
    expect_size(&call, &grad, "grad", 2, x.size);
    expect_like(&call, &log2_sum, "log2_sum", &x, "x");
    expect_size(&call, &log2_sum, "log2_sum", 2, x.size);
    MixtureLogProb p = mixture_parameters(&call, &x, &mixture, stack[6]);
    Tensor grad_x = new_tensor(&call, &x, 3, x.size);
    p.grad = grad.data, p.log2_sum = log2_sum.data, p.grad_x = grad_x.data;
    Mixture grads = mixture_backward(&call, &x, &mixture, &p, false);
    finish(&call, stack, 4, (Tensor[]){grad_x, grads.means, grads.log_weights, grads.bandwidths});
}
OPERATOR(
    mixture_log_prob_backward,
    "mixture_log_prob_backward(Tensor grad, Tensor x, Tensor means, Tensor log_weights, Tensor bandwidths, Tensor log2_sum, "
    "int n_angular) -> (Tensor, Tensor, Tensor, Tensor)",
    backward)
