/* Schema and registration of log_i0. Contract: kernels/log_i0.h. */
#include "log_i0.h"

#include "operator.h"

enum { GRAIN = 2048 };

static void forward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "log_i0"};
    Tensor concentration = take_tensor(&call, stack[0], "concentration", 1);
    Tensor log_i0 = new_tensor(&call, &concentration, 1, concentration.size);
    LogI0 p = {.concentration = concentration.data, .log_i0 = log_i0.data};
    run(&call, &concentration, KERNELS(log_i0), &p, concentration.size[0], GRAIN);
    finish(&call, stack, 1, (Tensor[]){log_i0});
}
OPERATOR(log_i0, "log_i0(Tensor concentration) -> Tensor", forward)

static void backward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "log_i0_backward"};
    Tensor grad_log_i0 = take_tensor(&call, stack[0], "grad_log_i0", 1);
    Tensor concentration = take_tensor(&call, stack[1], "concentration", 1);
    expect_like(&call, &grad_log_i0, "grad_log_i0", &concentration, "concentration");
    expect_size(&call, &grad_log_i0, "grad_log_i0", 1, concentration.size);
    Tensor grad_concentration = new_tensor(&call, &concentration, 1, concentration.size);
    LogI0 p = {
        .concentration = concentration.data, .grad_log_i0 = grad_log_i0.data, .grad_concentration = grad_concentration.data};
    run(&call, &concentration, KERNELS(log_i0_backward), &p, concentration.size[0], GRAIN);
    finish(&call, stack, 1, (Tensor[]){grad_concentration});
}
OPERATOR(log_i0_backward, "log_i0_backward(Tensor grad_log_i0, Tensor concentration) -> Tensor", backward)
