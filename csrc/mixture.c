/* See mixture.h. */
#include "mixture.h"

#include "mixture_cuda.h"

enum { PAIRS_PER_TASK = 32768 }; /* about 10 us of work */

Mixture take_mixture(Call *call, const StableIValue *values, const Tensor *x) {
    Mixture m = {take_tensor(call, values[0], "means", 3), take_tensor(call, values[1], "log_weights", 2),
                 take_shared_tensor(call, values[2], "bandwidths", 2)};
    const int64_t B = x->size[0], D = x->size[2], N = m.means.size[1];
    expect_like(call, &m.means, "means", x, "x");
    expect_like(call, &m.log_weights, "log_weights", x, "x");
    expect_like(call, &m.bandwidths, "bandwidths", x, "x");
    expect_size(call, &m.means, "means", 3, (int64_t[]){B, N, D});
    expect_size(call, &m.log_weights, "log_weights", 2, (int64_t[]){B, N});
    expect_size(call, &m.bandwidths, "bandwidths", 2, (int64_t[]){B, D});
    return m;
}

void expect_bandwidths(Call *call, const Tensor *bandwidths, int64_t rows) {
    if (!ok(call) || on_cuda(bandwidths)) return;
    const int64_t D = bandwidths->size[bandwidths->dim - 1];
    const MixtureLogProb p = {
        .B = rows, .G = (int)D, .bandwidth_stride = bandwidths->dim == 2 ? D : 0, .bandwidths = bandwidths->data};
    const int64_t bad = (bandwidths->is_double ? mixture_bad_bandwidth_f64 : mixture_bad_bandwidth_f32)(&p);
    expect(call, bad < 0, "bandwidths: expected positive finite numbers, got another one in row %lld", (long long)bad);
}

MixtureLogProb mixture_parameters(Call *call, const Tensor *x, const Mixture *m, StableIValue n_angular) {
    const int A = take_n_angular(call, n_angular, x->size[2]);
    MixtureLogProb p = {.B = x->size[0],
                        .M = x->size[1],
                        .N = m->means.size[1],
                        .G = (int)x->size[2] - A,
                        .A = A,
                        .bandwidth_stride = m->bandwidths.dim == 2 ? x->size[2] : 0,
                        .x = x->data,
                        .means = m->means.data,
                        .log_weights = m->log_weights.data,
                        .bandwidths = m->bandwidths.data};
    expect_bandwidths(call, &m->bandwidths, p.B);
    if (!ok(call) || on_cuda(x) || mixture_is_short(&p)) return p;
    p.rows = new_scratch(call, x, p.B * (int64_t)sizeof(MixtureRow));
    p.components = new_scratch(call, x, p.B * mixture_padded(p.N) * (1 + mixture_features(&p)) * (x->is_double ? 8 : 4));
    return p;
}

/* On a GPU: scratch memory for the forward or the backward pass. */
static void take_scratch(Call *call, const Tensor *x, MixtureLogProb *p, int backward) {
    MixturePlan plan;
    if (ok(call) && on_cuda(x)) p->scratch = new_scratch(call, x, mixture_plan(&plan, p, x->is_double, backward));
}

static int64_t rows_per_task(const MixtureLogProb *p) { return 1 + 4096 / (p->M + p->N + 1); }

static int64_t items_per_task(const MixtureLogProb *p, int64_t queries) {
    return 1 + PAIRS_PER_TASK / ((queries + 1) * (p->N + 1));
}

void mixture_forward(Call *call, const Tensor *x, MixtureLogProb *p) {
    take_scratch(call, x, p, 0);
    if (!mixture_is_short(p)) run(call, x, CPU_KERNELS(mixture_prepare), p, p->B, rows_per_task(p));
    run(call, x, KERNELS(mixture_log_prob), p, mixture_forward_items(p),
        items_per_task(p, mixture_is_short(p) ? p->M : MIXTURE_TILE));
}

Mixture mixture_backward(Call *call, const Tensor *x, const Mixture *m, MixtureLogProb *p, bool prepared) {
    Mixture grad = {new_tensor(call, x, 3, m->means.size), new_tensor(call, x, 2, m->log_weights.size),
                    new_tensor(call, x, (int)m->bandwidths.dim, m->bandwidths.size)};
    p->grad_means = grad.means.data, p->grad_log_weights = grad.log_weights.data, p->grad_bandwidths = grad.bandwidths.data;
    if (on_cuda(x)) take_scratch(call, x, p, 1);
    else p->sums = new_scratch(call, x, p->B * mixture_row_sums(p) * (int64_t)sizeof(double));
    if (!prepared && !mixture_is_short(p)) run(call, x, CPU_KERNELS(mixture_prepare), p, p->B, rows_per_task(p));
    run(call, x, CPU_KERNELS(mixture_backward_pairs), p, mixture_backward_items(p),
        items_per_task(p, mixture_is_short(p) ? p->M : mixture_chunk(p)));
    if (!mixture_is_short(p)) run(call, x, CPU_KERNELS(mixture_backward_reduce), p, p->B, rows_per_task(p));
    run(call, x, (Kernels){mixture_backward_share_f32, mixture_backward_share_f64, mixture_log_prob_backward_cuda}, p, 1, 1);
    return grad;
}
