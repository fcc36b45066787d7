/* See filter_gradients.h. */
#include "filter_gradients.h"

/* Of one result; missing where the loss does not depend on it. */
static Tensor take_gradient(Call *call, StableIValue value, const char *name, const Tensor *result) {
    StableIValue inner;
    if (!take_optional(value, &inner)) return (Tensor){0};
    Tensor grad = take_tensor(call, inner, name, (int)result->dim);
    expect_like(call, &grad, name, result, "states");
    expect_size(call, &grad, name, (int)result->dim, result->size);
    return grad;
}

FilterGradients take_gradients(Call *call, const StableIValue *values, const FilterSteps *s) {
    return (FilterGradients){.states = take_gradient(call, values[0], "grad_states", &s->states),
                             .predicted = take_gradient(call, values[1], "grad_predicted", &s->posterior),
                             .posterior = take_gradient(call, values[2], "grad_posterior", &s->posterior),
                             .log_sum = take_gradient(call, values[3], "grad_log_sum", &s->log_sum),
                             .ess = take_gradient(call, values[4], "grad_ess", &s->ess)};
}

FilterSteps take_steps(Call *call, const StableIValue *values) {
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

void new_gradients(Call *call, const FilterModels *m, FilterGradients *g) {
    const Tensor *states = &m->move.x;
    g->state = new_tensor(call, states, 3, states->size), g->weights = new_tensor(call, states, 2, states->size);
    g->likelihood = new_tensor(call, states, 2, states->size), g->zeros = new_tensor(call, states, 1, states->size);
    g->codes = new_tensor(call, states, 3, m->codes.size);
    g->bandwidths = new_tensor(call, states, (int)m->bandwidths.dim, m->bandwidths.size);
    g->move_weights = new_tensor(call, states, (int)m->move.weights.dim, m->move.weights.size);
    g->weigh_weights = new_tensor(call, states, (int)m->weigh.weights.dim, m->weigh.weights.size);
    add_up(call, g->zeros, (Tensor){0}, (Tensor){0});
    add_up(call, g->bandwidths, (Tensor){0}, (Tensor){0});
}
