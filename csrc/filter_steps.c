/* See filter_steps.h. */
#include "filter_steps.h"

#include "filter_poses.h"
#include "normalize_log_weights.h"

void add_up(Call *call, Tensor sum, Tensor a, Tensor b) {
    int64_t n = 1;
    for (int64_t d = 0; d < sum.dim; d++) n *= sum.size[d];
    run(call, &sum, KERNELS(filter_poses_add), &(FilterPosesAdd){sum.data, a.data, b.data}, n, FILTER_GRAIN);
}

static NormalizeLogWeights normalization(Call *call, const FilterModels *m, const FilterSteps *s, int64_t t,
                                         const Tensor *log_weights) {
    NormalizeLogWeights p = {.B = log_weights->size[0],
                             .N = log_weights->size[1],
                             .normalized = rows_at(m, &s->posterior, t).data,
                             .log_sum = rows_at(m, &s->log_sum, t).data,
                             .ess = rows_at(m, &s->ess, t).data};
    if (on_cuda(log_weights)) p.scratch = new_scratch(call, log_weights, NORMALIZE_SCRATCH(p.B, p.N));
    return p;
}

static Mixture belief(const FilterModels *m, const FilterSteps *s, int64_t t) {
    return (Mixture){rows_at(m, &s->states, t), rows_at(m, &s->posterior, t), m->bandwidths};
}

/* Draws from the belief before t, and moves what it drew. */
static void predict(Call *call, FilterModels *m, FilterSteps *s, int64_t t, const Tensor *seeds, int scheme) {
    Mixture before = belief(m, s, t - 1);
    Tensor drawn = rows_at(m, &s->drawn, t - 1), moved = rows_at(m, &s->states, t);
    Resample r = {.M = before.log_weights.size[1], .scheme = scheme, .ancestors = rows_at(m, &s->ancestors, t).data};
    r.seed = (Seed){.seed = rows_at(m, seeds, t).data, .per_row = true};
    resample_parameters(call, &before.log_weights, &r);
    mixture_resample_rows(call, &before, 1, &r, &drawn);
    move_at(call, m, t, &drawn, &moved);
}

void filter_step(Call *call, FilterModels *m, FilterSteps *s, int64_t t, const Tensor *seeds, int scheme,
                 const Tensor *scratch) {
    const int kept = call->n_owned;
    Tensor here = rows_at(m, &s->states, t);
    if (t > 0) predict(call, m, s, t, seeds, scheme);
    weigh_at(call, m, t, &here, scratch);
    add_up(call, *scratch, rows_at(m, &s->predicted, t), *scratch);
    NormalizeLogWeights p = normalization(call, m, s, t, scratch);
    p.log_weights = scratch->data;
    run(call, scratch, KERNELS(normalize_log_weights), &p, p.B, normalize_grain(p.N));
    release(call, kept);
}

/* From the gradients of step t's states and weights to those of the step before. */
static void predict_backward(Call *call, FilterModels *m, const FilterSteps *s, int64_t t, FilterGradients *g) {
    Mixture before = belief(m, s, t - 1);
    Tensor drawn = rows_at(m, &s->drawn, t - 1);
    NetworkGradients by_move = move_backward_at(call, m, t, &drawn, &g->state);
    add_up(call, g->move_weights, g->move_weights, by_move.weights);
    add_up(call, g->likelihood, rows_at(m, &g->predicted, t), g->likelihood);
    Mixture by_draws = iwsg_backward(call, &drawn, &before, 1, &g->likelihood);
    add_up(call, g->bandwidths, g->bandwidths, by_draws.bandwidths);
    add_up(call, g->state, rows_at(m, &g->states, t - 1), by_draws.means);
    add_up(call, g->weights, rows_at(m, &g->posterior, t - 1), by_draws.log_weights);
}

void filter_step_backward(Call *call, FilterModels *m, const FilterSteps *s, int64_t t, FilterGradients *g) {
    const int kept = call->n_owned;
    Tensor here = rows_at(m, &s->states, t);
    NormalizeLogWeights p = normalization(call, m, s, t, &g->weights);
    p.grad_normalized = g->weights.data;
    p.grad_log_sum = g->log_sum.data ? rows_at(m, &g->log_sum, t).data : g->zeros.data;
    p.grad_ess = g->ess.data ? rows_at(m, &g->ess, t).data : g->zeros.data;
    p.grad_log_weights = g->likelihood.data;
    run(call, &g->weights, KERNELS(normalize_log_weights_backward), &p, p.B, normalize_grain(p.N));
    NetworkGradients by_weigh = weigh_backward_at(call, m, t, &here, &g->likelihood);
    add_up(call, rows_at(m, &g->codes, t), by_weigh.condition, (Tensor){0});
    add_up(call, g->weigh_weights, g->weigh_weights, by_weigh.weights);
    add_up(call, g->state, g->state, by_weigh.x);
    if (t > 0) predict_backward(call, m, s, t, g);
    release(call, kept);
}
