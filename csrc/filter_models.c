/* See filter_models.h. */
#include "filter_models.h"

#include "move_poses.h"
#include "weigh_poses.h"

static const NetworkNames MOVES = {"states", "noise", "condition", "move_weights", "move_layers"};
static const NetworkNames WEIGHS = {"states", "extra", "codes", "weigh_weights", "weigh_layers"};

static void expect_models(Call *call, const FilterModels *m, const Tensor *states, const Tensor *scale) {
    const int64_t T = m->codes.size[0], B = states->size[0], N = states->size[1];
    expect(call, T > 0, "codes: expected at least one step, got 0");
    expect(call, N > 0, "states: expected at least one particle, got 0");
    expect_like(call, &m->bandwidths, "bandwidths", states, "states");
    expect_like(call, &m->codes, "codes", states, "states");
    expect_like(call, scale, "scale", states, "states");
    if (m->noise.handle) expect_like(call, &m->noise, "noise", states, "states");
    expect_size(call, &m->bandwidths, "bandwidths", 2, (int64_t[]){B, 3});
    expect_size(call, &m->codes, "codes", 3, (int64_t[]){T, B, m->codes.size[2]});
    expect_size(call, &m->noise, "noise", 4, (int64_t[]){T, B, N, m->noise.size[3]});
    expect_size(call, scale, "scale", 1, (int64_t[]){4});
    expect_width(call, "codes", m->codes.size[2]);
    if (m->noise.handle) expect_width(call, "noise", m->noise.size[3]);
}

FilterModels take_filter_models(Call *call, const StableIValue *values, const Tensor *states, bool backward) {
    StableIValue inner;
    FilterModels m = {.bandwidths = take_shared_tensor(call, values[0], "bandwidths", 2),
                      .codes = take_tensor(call, values[1], "codes", 3),
                      .move.x = *states,
                      .weigh.x = *states,
                      .n = states->size[0]};
    if (take_optional(values[2], &inner)) m.noise = take_tensor(call, inner, "noise", 4);
    m.move.weights = take_shared_tensor(call, values[3], "move_weights", 2);
    Tensor scale = take_tensor(call, values[5], "scale", 1);
    m.weigh.weights = take_shared_tensor(call, values[6], "weigh_weights", 2);
    const double minimum = take_float(values[8]);
    const Tensor *grad = backward ? states : NULL; /* to be replaced: it says that there will be one */
    expect_models(call, &m, states, &scale);
    expect(call, minimum >= 1e-30 && minimum < 1, "minimum: expected a number in [1e-30, 1), got %g", minimum);
    move_poses_form(&m.moves, scale.data);
    weigh_poses_form(&m.weighs, minimum, 0); /* nothing further enters */
    if (ok(call)) m.moves.E = (int)m.noise.size[3], m.weighs.K = (int)m.codes.size[2];
    network_parameters(call, &m.move, &MOVES, values[4], &m.moves, grad);
    network_parameters(call, &m.weigh, &WEIGHS, values[7], &m.weighs, grad);
    expect_shares(call, &m.moves, 4);
    expect_shares(call, &m.weighs, 1);
    return m;
}

/* A network on some rows, with the weights of their set. */
static void take_rows_of(Call *call, Network *a, SmallNetwork *p, int64_t first, int64_t n) {
    const int64_t rows = a->x.size[0];
    a->x = items_of(&a->x, first, n);
    if (n < rows && a->weights.dim == 2) a->weights = item_of(&a->weights, first / (rows / a->weights.size[0]));
    network_layout(a, p);
    network_prepare(call, a, p);
}

FilterModels models_of_rows(Call *call, const FilterModels *all, int64_t first, int64_t n) {
    FilterModels m = *all;
    m.first = first, m.n = n;
    if (m.bandwidths.dim == 2) m.bandwidths = items_of(&m.bandwidths, first, n);
    take_rows_of(call, &m.move, &m.moves, first, n);
    take_rows_of(call, &m.weigh, &m.weighs, first, n);
    return m;
}

static void set_move(FilterModels *m, int64_t t, const Tensor *x) {
    m->move.x = *x;
    m->move.extra = rows_at(m, &m->noise, t);
    network_inputs(&m->move, &m->moves);
}

static void set_weigh(FilterModels *m, int64_t t, const Tensor *x) {
    m->weigh.x = *x;
    m->weigh.condition = rows_at(m, &m->codes, t);
    network_inputs(&m->weigh, &m->weighs);
}

void move_at(Call *call, FilterModels *m, int64_t t, const Tensor *x, const Tensor *moved) {
    set_move(m, t, x);
    m->moves.y = moved->data;
    network_forward(call, &m->move, &m->moves, move_poses_forward_cuda);
}

void weigh_at(Call *call, FilterModels *m, int64_t t, const Tensor *x, const Tensor *log_weights) {
    set_weigh(m, t, x);
    m->weighs.y = log_weights->data;
    network_forward(call, &m->weigh, &m->weighs, weigh_poses_forward_cuda);
}

NetworkGradients move_backward_at(Call *call, FilterModels *m, int64_t t, const Tensor *x, const Tensor *grad) {
    set_move(m, t, x);
    m->moves.grad_y = grad->data;
    return network_backward(call, &m->move, &m->moves, 0, move_poses_backward_cuda);
}

NetworkGradients weigh_backward_at(Call *call, FilterModels *m, int64_t t, const Tensor *x, const Tensor *grad) {
    set_weigh(m, t, x);
    m->weighs.grad_y = grad->data;
    return network_backward(call, &m->weigh, &m->weighs, 1, weigh_poses_backward_cuda);
}
