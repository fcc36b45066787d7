/* Schema and registration of normalize_log_weights. Contract: kernels/normalize_log_weights.h. */
#include "normalize_log_weights.h"

#include "operator.h"

static void forward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "normalize_log_weights"};
    Tensor log_weights = take_tensor(&call, stack[0], "log_weights", 2);
    expect(&call, log_weights.size[1] > 0, "log_weights: expected at least one particle, got 0");
    Tensor normalized = new_tensor(&call, &log_weights, 2, log_weights.size);
    Tensor log_sum = new_tensor(&call, &log_weights, 1, log_weights.size);
    Tensor ess = new_tensor(&call, &log_weights, 1, log_weights.size);
    NormalizeLogWeights p = {.B = log_weights.size[0],
                             .N = log_weights.size[1],
                             .log_weights = log_weights.data,
                             .normalized = normalized.data,
                             .log_sum = log_sum.data,
                             .ess = ess.data};
    if (on_cuda(&log_weights)) p.scratch = new_scratch(&call, &log_weights, NORMALIZE_SCRATCH(p.B, p.N));
    run(&call, &log_weights, KERNELS(normalize_log_weights), &p, p.B, normalize_grain(p.N));
    finish(&call, stack, 3, (Tensor[]){normalized, log_sum, ess});
}
OPERATOR(normalize_log_weights, "normalize_log_weights(Tensor log_weights) -> (Tensor, Tensor, Tensor)", forward)

static void backward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "normalize_log_weights_backward"};
    Tensor grad_normalized = take_tensor(&call, stack[0], "grad_normalized", 2);
    Tensor grad_log_sum = take_tensor(&call, stack[1], "grad_log_sum", 1);
    Tensor grad_ess = take_tensor(&call, stack[2], "grad_ess", 1);
    Tensor normalized = take_tensor(&call, stack[3], "normalized", 2);
    Tensor log_sum = take_tensor(&call, stack[4], "log_sum", 1);
    Tensor ess = take_tensor(&call, stack[5], "ess", 1);
    expect_like(&call, &grad_normalized, "grad_normalized", &normalized, "normalized");
    expect_size(&call, &grad_normalized, "grad_normalized", 2, normalized.size);
    const Tensor *rows[] = {&grad_log_sum, &grad_ess, &log_sum, &ess};
    const char *names[] = {"grad_log_sum", "grad_ess", "log_sum", "ess"};
    for (int i = 0; i < 4; i++) {
        expect_like(&call, rows[i], names[i], &normalized, "normalized");
        expect_size(&call, rows[i], names[i], 1, normalized.size);
    }
    Tensor grad_log_weights = new_tensor(&call, &normalized, 2, normalized.size);
    NormalizeLogWeights p = {.B = normalized.size[0],
                             .N = normalized.size[1],
                             .normalized = normalized.data,
                             .log_sum = log_sum.data,
                             .ess = ess.data,
                             .grad_normalized = grad_normalized.data,
                             .grad_log_sum = grad_log_sum.data,
                             .grad_ess = grad_ess.data,
                             .grad_log_weights = grad_log_weights.data};
    if (on_cuda(&normalized)) p.scratch = new_scratch(&call, &normalized, NORMALIZE_SCRATCH(p.B, p.N));
    run(&call, &normalized, KERNELS(normalize_log_weights_backward), &p, p.B, normalize_grain(p.N));
    finish(&call, stack, 1, (Tensor[]){grad_log_weights});
}
OPERATOR(normalize_log_weights_backward,
         "normalize_log_weights_backward(Tensor grad_normalized, Tensor grad_log_sum, Tensor grad_ess, Tensor normalized, "
         "Tensor log_sum, Tensor ess) -> Tensor",
         backward)
