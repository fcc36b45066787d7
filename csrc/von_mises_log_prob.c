/* Schema and registration of von_mises_log_prob. Contract: kernels/von_mises_log_prob.h. */
#include "von_mises_log_prob.h"

#include "operator.h"

enum { GRAIN = 2048 };

/* x, mean and concentration, stack[0] to stack[2], with one size. */
static void take_arguments(Call *call, const StableIValue *stack, Tensor *x, Tensor *mean, Tensor *concentration) {
    *x = take_tensor(call, stack[0], "x", 1);
    *mean = take_tensor(call, stack[1], "mean", 1);
    *concentration = take_tensor(call, stack[2], "concentration", 1);
    expect_like(call, mean, "mean", x, "x");
    expect_size(call, mean, "mean", 1, x->size);
    expect_like(call, concentration, "concentration", x, "x");
    expect_size(call, concentration, "concentration", 1, x->size);
}

static void forward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "von_mises_log_prob"};
    Tensor x, mean, concentration;
    take_arguments(&call, stack, &x, &mean, &concentration);
    Tensor log_prob = new_tensor(&call, &x, 1, x.size);
    VonMisesLogProb p = {.x = x.data, .mean = mean.data, .concentration = concentration.data, .log_prob = log_prob.data};
    run(&call, &x, KERNELS(von_mises_log_prob), &p, x.size[0], GRAIN);
    finish(&call, stack, 1, (Tensor[]){log_prob});
}
OPERATOR(von_mises_log_prob, "von_mises_log_prob(Tensor x, Tensor mean, Tensor concentration) -> Tensor", forward)

static void backward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "von_mises_log_prob_backward"};
    Tensor grad_log_prob = take_tensor(&call, stack[0], "grad_log_prob", 1), x, mean, concentration;
    take_arguments(&call, stack + 1, &x, &mean, &concentration);
    expect_like(&call, &grad_log_prob, "grad_log_prob", &x, "x");
    expect_size(&call, &grad_log_prob, "grad_log_prob", 1, x.size);
    Tensor grad_x = new_tensor(&call, &x, 1, x.size);
    Tensor grad_mean = new_tensor(&call, &x, 1, x.size);
    Tensor grad_concentration = new_tensor(&call, &x, 1, x.size);
    VonMisesLogProb p = {.x = x.data,
                         .mean = mean.data,
                         .concentration = concentration.data,
                         .grad_log_prob = grad_log_prob.data,
                         .grad_x = grad_x.data,
                         .grad_mean = grad_mean.data,
                         .grad_concentration = grad_concentration.data};
    run(&call, &x, KERNELS(von_mises_log_prob_backward), &p, x.size[0], GRAIN);
    finish(&call, stack, 3, (Tensor[]){grad_x, grad_mean, grad_concentration});
}
OPERATOR(von_mises_log_prob_backward,
         "von_mises_log_prob_backward(Tensor grad_log_prob, Tensor x, Tensor mean, Tensor concentration) -> "
         "(Tensor, Tensor, Tensor)",
         backward)
