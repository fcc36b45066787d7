/* Schema and registration of filter_poses; its steps are in filter_steps.h. Contract: kernels/filter_poses.h. */
#include "filter_poses.h"

#include "filter_steps.h"

#define MODELS                                                                                                      \
    "Tensor bandwidths, Tensor codes, Tensor? noise, Tensor move_weights, int[] move_layers, Tensor scale, Tensor " \
    "weigh_weights, int[] weigh_layers, float minimum"

static void forward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "filter_poses"};
    Tensor initial = take_tensor(&call, stack[0], "states", 3), seeds = take_indices(&call, stack[10], "seeds", 2);
    FilterModels m = take_filter_models(&call, stack + 1, &initial, false);
    const int64_t T = m.codes.size[0], B = initial.size[0], N = initial.size[1], size[] = {T, B, N, 3};
    const int64_t draws[] = {ok(&call) ? T - 1 : 0, B, N, 3};
    expect_like(&call, &seeds, "seeds", &initial, "states");
    expect_size(&call, &seeds, "seeds", 2, size);
    const int scheme = (int)take_int(stack[11]);
    expect(&call, scheme >= MULTINOMIAL && scheme <= RESIDUAL, "scheme: expected 0 to 3, got %d", scheme);
    FilterSteps s = {new_tensor(&call, &initial, 4, size), new_tensor(&call, &initial, 3, size),
                     new_tensor(&call, &initial, 3, size), new_indices(&call, &initial, 3, size),
                     new_tensor(&call, &initial, 2, size), new_tensor(&call, &initial, 2, size),
                     new_tensor(&call, &initial, 4, draws)};
    Tensor scratch = new_tensor(&call, &initial, 2, size + 1);
    FilterPosesBegin p = {.B = B, .N = N, .predicted = s.predicted.data, .ancestors = s.ancestors.data};
    run(&call, &initial, KERNELS(filter_poses_begin), &p, T * B * N, FILTER_GRAIN);
    if (ok(&call)) add_up(&call, step_of(&s.states, 0), initial, (Tensor){0});
    for (int64_t t = 0; ok(&call) && t < T; t++) filter_step(&call, &m, &s, t, &seeds, scheme, &scratch);
    finish(&call, stack, 7, (Tensor[]){s.states, s.predicted, s.posterior, s.ancestors, s.log_sum, s.ess, s.drawn});
}
OPERATOR(filter_poses,
         "filter_poses(Tensor states, " MODELS
         ", Tensor seeds, int scheme) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
         "Tensor)",
         forward)

/* Of one result; missing where the loss does not depend on it. */
static Tensor take_gradient(Call *call, StableIValue value, const char *name, const Tensor *result) {
    StableIValue inner;
    if (!take_optional(value, &inner)) return no_tensor();
    Tensor grad = take_tensor(call, inner, name, (int)result->dim);
    expect_like(call, &grad, name, result, "states");
    expect_size(call, &grad, name, (int)result->dim, result->size);
    return grad;
}

static FilterSteps take_steps(Call *call, const StableIValue *values) {
    FilterSteps s = {.states = take_tensor(call, values[0], "states", 4),
                     .posterior = take_tensor(call, values[1], "posterior", 3),
                     .log_sum = take_tensor(call, values[2], "log_sum", 2),
                     .ess = take_tensor(call, values[3], "ess", 2),
                     .drawn = take_tensor(call, values[4], "drawn", 4)};
    const Tensor *rest[] = {&s.posterior, &s.log_sum, &s.ess, &s.drawn};
    const char *names[] = {"posterior", "log_sum", "ess", "drawn"};
    expect(call, !ok(call) || s.states.size[0] > 0, "states: expected at least one step, got 0");
    const int64_t *size = s.states.size, draws[] = {size[0] - 1, size[1], size[2], size[3]};
    for (int i = 0; i < 4; i++) {
        expect_like(call, rest[i], names[i], &s.states, "states");
        expect_size(call, rest[i], names[i], (int)rest[i]->dim, i < 3 ? size : draws);
    }
    return s;
}

static void backward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "filter_poses_backward"};
    FilterSteps s = take_steps(&call, stack + 5);
    FilterGradients g = {.states = take_gradient(&call, stack[0], "grad_states", &s.states),
                         .predicted = take_gradient(&call, stack[1], "grad_predicted", &s.posterior),
                         .posterior = take_gradient(&call, stack[2], "grad_posterior", &s.posterior),
                         .log_sum = take_gradient(&call, stack[3], "grad_log_sum", &s.log_sum),
                         .ess = take_gradient(&call, stack[4], "grad_ess", &s.ess)};
    Tensor first = step_of(&s.states, 0);
    FilterModels m = take_filter_models(&call, stack + 10, &first, true);
    const int64_t T = s.states.size[0];
    expect(&call, m.codes.size[0] == T, "codes: expected %lld steps, got %lld", (long long)T, (long long)m.codes.size[0]);
    g.state = new_tensor(&call, &first, 3, first.size), g.weights = new_tensor(&call, &first, 2, first.size);
    g.likelihood = new_tensor(&call, &first, 2, first.size), g.zeros = new_tensor(&call, &first, 1, first.size);
    g.codes = new_tensor(&call, &first, 3, m.codes.size);
    g.bandwidths = new_tensor(&call, &first, (int)m.bandwidths.dim, m.bandwidths.size);
    g.move_weights = new_tensor(&call, &first, (int)m.move.weights.dim, m.move.weights.size);
    g.weigh_weights = new_tensor(&call, &first, (int)m.weigh.weights.dim, m.weigh.weights.size);
    const Tensor sums[] = {g.zeros, g.bandwidths, g.move_weights, g.weigh_weights};
    for (int i = 0; i < 4; i++) add_up(&call, sums[i], (Tensor){0}, (Tensor){0});
    if (ok(&call)) {
        add_up(&call, g.state, step_of(&g.states, T - 1), (Tensor){0});
        add_up(&call, g.weights, step_of(&g.posterior, T - 1), (Tensor){0});
    }
    for (int64_t t = T - 1; ok(&call) && t >= 0; t--) filter_step_backward(&call, &m, &s, t, &g);
    finish(&call, stack, 5, (Tensor[]){g.state, g.bandwidths, g.codes, g.move_weights, g.weigh_weights});
}
OPERATOR(filter_poses_backward,
         "filter_poses_backward(Tensor? grad_states, Tensor? grad_predicted, Tensor? grad_posterior, Tensor? grad_log_sum, "
         "Tensor? grad_ess, Tensor states, Tensor posterior, Tensor log_sum, Tensor ess, Tensor drawn, " MODELS
         ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
         backward)
