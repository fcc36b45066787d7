/* Schema and registration of iwsg_log_weights. Contract: kernels/iwsg_log_weights.h. */
#include "iwsg_log_weights.h"

#include "mixture.h"
#include "mixture_cuda.h"

static void forward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "iwsg_log_weights"};
    Tensor samples = take_tensor(&call, stack[0], "samples", 3);
    (void)take_mixture(&call, stack + 1, &samples);
    (void)take_n_angular(&call, stack[4], samples.size[2]);
    Tensor log_weights = new_tensor(&call, &samples, 2, samples.size);
    IwsgLogWeights p = {.log_weights = log_weights.data};
    run(&call, &samples, KERNELS(iwsg_log_weights), &p, samples.size[0] * samples.size[1], 1 << 16);
    finish(&call, stack, 1, (Tensor[]){log_weights});
}
OPERATOR(iwsg_log_weights,
         "iwsg_log_weights(Tensor samples, Tensor means, Tensor log_weights, Tensor bandwidths, int n_angular) -> Tensor",
         forward)

Mixture iwsg_backward(Call *call, const Tensor *x, const Mixture *mixture, StableIValue n_angular, const Tensor *grad) {
    MixtureLogProb p = mixture_parameters(call, x, mixture, n_angular);
    p.grad = grad->data;
    p.log_prob = new_tensor(call, x, 2, x->size).data;
    p.log2_sum = new_tensor(call, x, 2, x->size).data;
    bool backward_sums = on_cuda(x) ? mixture_is_small(&p) : mixture_is_short(&p);
    if (!backward_sums) mixture_forward(call, x, &p);
    return mixture_backward(call, x, mixture, &p, true);
}

static void backward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "iwsg_log_weights_backward"};
    Tensor grad = take_tensor(&call, stack[0], "grad", 2);
    Tensor samples = take_tensor(&call, stack[1], "samples", 3);
    Mixture mixture = take_mixture(&call, stack + 2, &samples);
    expect_like(&call, &grad, "grad", &samples, "samples");
    expect_size(&call, &grad, "grad", 2, samples.size);
    Mixture grads = iwsg_backward(&call, &samples, &mixture, stack[5], &grad);
    finish(&call, stack, 3, (Tensor[]){grads.means, grads.log_weights, grads.bandwidths});
}
OPERATOR(iwsg_log_weights_backward,
         "iwsg_log_weights_backward(Tensor grad, Tensor samples, Tensor means, Tensor log_weights, Tensor bandwidths, int "
         "n_angular) "
         "-> (Tensor, Tensor, Tensor)",
         backward)
