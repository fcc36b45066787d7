/* Schema and registration of two_filter_log_prob. Contract: kernels/two_filter_log_prob.h. */
#include "two_filter_log_prob.h"

#include "mixture.h"

enum { NUMBERS_PER_TASK = 8192 };

static TwoFilterLogProb take_mixing(Call *call, StableIValue value) {
    double mixing = take_float(value);
    expect(call, mixing >= 0 && mixing <= 1, "mixing: expected 0 to 1, got %g", mixing);
    TwoFilterLogProb p = {0};
    two_filter_mix(&p, mixing);
    return p;
}

static void forward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "two_filter_log_prob"};
    Tensor x = take_tensor(&call, stack[0], "x", 3);
    Mixture ahead = take_mixture(&call, stack + 1, &x), back = take_mixture(&call, stack + 4, &x);
    MixtureLogProb f = mixture_parameters(&call, &x, &ahead, stack[7]), b = mixture_parameters(&call, &x, &back, stack[7]);
    Tensor results[5];
    for (int i = 0; i < 5; i++) results[i] = new_tensor(&call, &x, 2, x.size);
    f.log_prob = results[0].data, b.log_prob = results[1].data, f.log2_sum = results[3].data, b.log2_sum = results[4].data;
    mixture_forward(&call, &x, &f);
    mixture_forward(&call, &x, &b);
    TwoFilterLogProb p = take_mixing(&call, stack[8]);
    p.log_forward = f.log_prob, p.log_backward = b.log_prob, p.log_proposal = results[2].data;
    run(&call, &x, KERNELS(two_filter_log_prob), &p, f.B * f.M, NUMBERS_PER_TASK);
    finish(&call, stack, 5, results);
}
OPERATOR(two_filter_log_prob,
         "two_filter_log_prob(Tensor x, Tensor forward_means, Tensor forward_log_weights, Tensor forward_bandwidths, "
         "Tensor backward_means, Tensor backward_log_weights, Tensor backward_bandwidths, int n_angular, float mixing) "
         "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
         forward)

static void backward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "two_filter_log_prob_backward"};
    static const char *const names[] = {"grad_log_forward", "grad_log_backward", "grad_log_proposal", "log_forward",
                                        "log_backward",     "forward_log2_sum",  "backward_log2_sum"};
    Tensor pairs[7];
    for (int i = 0; i < 7; i++) pairs[i] = take_tensor(&call, stack[i], names[i], 2);
    Tensor x = take_tensor(&call, stack[7], "x", 3);
    Mixture ahead = take_mixture(&call, stack + 8, &x), back = take_mixture(&call, stack + 11, &x);
    for (int i = 0; i < 7; i++) {
        expect_like(&call, &pairs[i], names[i], &x, "x");
        expect_size(&call, &pairs[i], names[i], 2, x.size);
    }
    MixtureLogProb f = mixture_parameters(&call, &x, &ahead, stack[14]), b = mixture_parameters(&call, &x, &back, stack[14]);
    static const int64_t none[3] = {0, 0, 0};
    const bool wants_x = take_int(stack[16]) != 0;
    Tensor grad_x = new_tensor(&call, &x, 3, wants_x ? x.size : none);
    Tensor grad_x_backward = new_tensor(&call, &x, 3, wants_x ? x.size : none);
    Tensor to_forward = new_tensor(&call, &x, 2, x.size), to_backward = new_tensor(&call, &x, 2, x.size);
    TwoFilterLogProb p = take_mixing(&call, stack[15]);
    p.log_forward = pairs[3].data, p.log_backward = pairs[4].data;
    p.grad_log_forward = pairs[0].data, p.grad_log_backward = pairs[1].data, p.grad_log_proposal = pairs[2].data;
    p.grad_forward = to_forward.data, p.grad_backward = to_backward.data;
    p.grad_x = grad_x.data, p.grad_x_backward = grad_x_backward.data;
    run(&call, &x, KERNELS(two_filter_log_prob_backward), &p, f.B * f.M, NUMBERS_PER_TASK);
    f.grad = to_forward.data, f.log2_sum = pairs[5].data, f.grad_x = wants_x ? grad_x.data : NULL;
    b.grad = to_backward.data, b.log2_sum = pairs[6].data, b.grad_x = wants_x ? grad_x_backward.data : NULL;
    Mixture gf = mixture_backward(&call, &x, &ahead, &f, false), gb = mixture_backward(&call, &x, &back, &b, false);
    if (wants_x) run(&call, &x, KERNELS(two_filter_add), &p, f.B * f.M * x.size[2], NUMBERS_PER_TASK);
    finish(&call, stack, 7,
           (Tensor[]){grad_x, gf.means, gf.log_weights, gf.bandwidths, gb.means, gb.log_weights, gb.bandwidths});
}
OPERATOR(two_filter_log_prob_backward,
         "two_filter_log_prob_backward(Tensor grad_log_forward, Tensor grad_log_backward, Tensor grad_log_proposal, "
         "Tensor log_forward, Tensor log_backward, Tensor forward_log2_sum, Tensor backward_log2_sum, Tensor x, "
         "Tensor forward_means, Tensor forward_log_weights, Tensor forward_bandwidths, Tensor backward_means, "
         "Tensor backward_log_weights, Tensor backward_bandwidths, int n_angular, float mixing, int wants_x) "
         "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
         backward)
