/* Schema and registration of filter_poses; its steps are in filter_steps.h. Contract: kernels/filter_poses.h. */
#include "filter_poses.h"

#include "filter_blocks.h"
#include "filter_gradients.h"

typedef struct {
    const FilterSteps *steps;
    Tensor initial, seeds, scratch; /* scratch (B, N) */
    int scheme;
} Forward;

static void forward_rows(Call *call, FilterModels *m, int64_t block, void *parameters) {
    (void)block;
    const Forward *f = parameters;
    FilterSteps s = *f->steps;
    const Tensor scratch = items_of(&f->scratch, m->first, m->n);
    add_up(call, rows_at(m, &s.states, 0), items_of(&f->initial, m->first, m->n), (Tensor){0});
    for (int64_t t = 0; ok(call) && t < m->codes.size[0]; t++) filter_step(call, m, &s, t, &f->seeds, f->scheme, &scratch);
}

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
    FilterPosesBegin p = {.B = B, .N = N, .predicted = s.predicted.data, .ancestors = s.ancestors.data};
    run(&call, &initial, KERNELS(filter_poses_begin), &p, T * B * N, FILTER_GRAIN);
    Forward f = {&s, initial, seeds, new_tensor(&call, &initial, 2, initial.size), scheme};
    const FilterBlocks blocks = filter_blocks(&call, &m);
    each_block(&call, &blocks, &m, forward_rows, &f);
    finish(&call, stack, 7, (Tensor[]){s.states, s.predicted, s.posterior, s.ancestors, s.log_sum, s.ess, s.drawn});
}
OPERATOR(filter_poses,
         "filter_poses(Tensor states, " FILTER_MODELS
         ", Tensor seeds, int scheme) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
         "Tensor)",
         forward)

/* What blocks add up each for itself: their gradients of the shared bandwidths, if they are, and of the weights. */
enum { SHARED = 3 };
typedef struct {
    const FilterSteps *steps;
    const FilterGradients *gradients;
    Tensor sums[SHARED]; /* (blocks, numbers), or none */
} Backward;

static void backward_rows(Call *call, FilterModels *m, int64_t block, void *parameters) {
    const Backward *b = parameters;
    const int64_t T = m->codes.size[0];
    FilterGradients g = *b->gradients;
    Tensor *rows[] = {&g.state, &g.weights, &g.likelihood}, *shared[] = {&g.bandwidths, &g.move_weights, &g.weigh_weights};
    for (int i = 0; i < 3; i++) *rows[i] = items_of(rows[i], m->first, m->n);
    for (int i = 0; i < SHARED; i++)
        *shared[i] = b->sums[i].handle ? item_of(&b->sums[i], block) : items_of(shared[i], m->first, m->n);
    add_up(call, g.state, rows_at(m, &g.states, T - 1), (Tensor){0});
    add_up(call, g.weights, rows_at(m, &g.posterior, T - 1), (Tensor){0});
    for (int64_t t = T - 1; ok(call) && t >= 0; t--) filter_step_backward(call, m, b->steps, t, &g);
}

static void backward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "filter_poses_backward"};
    FilterSteps s = take_steps(&call, stack + 5);
    FilterGradients g = take_gradients(&call, stack, &s);
    Tensor first = item_of(&s.states, 0);
    FilterModels m = take_filter_models(&call, stack + 10, &first, true);
    const int64_t T = s.states.size[0];
    expect(&call, m.codes.size[0] == T, "codes: expected %lld steps, got %lld", (long long)T, (long long)m.codes.size[0]);
    expect_bandwidths(&call, &m.bandwidths, first.size[0]);
    new_gradients(&call, &m, &g);
    const FilterBlocks blocks = filter_blocks(&call, &m);
    const Tensor *shared[] = {&g.bandwidths, &g.move_weights, &g.weigh_weights};
    Backward b = {.steps = &s, .gradients = &g};
    for (int i = m.bandwidths.dim == 2; i < SHARED; i++) b.sums[i] = new_sums(&call, &blocks, shared[i]);
    each_block(&call, &blocks, &m, backward_rows, &b);
    for (int i = m.bandwidths.dim == 2; i < SHARED; i++) add_sums(&call, &blocks, &b.sums[i], *shared[i]);
    finish(&call, stack, 5, (Tensor[]){g.state, g.bandwidths, g.codes, g.move_weights, g.weigh_weights});
}
OPERATOR(filter_poses_backward,
         "filter_poses_backward(Tensor? grad_states, Tensor? grad_predicted, Tensor? grad_posterior, Tensor? grad_log_sum, "
         "Tensor? grad_ess, Tensor states, Tensor posterior, Tensor log_sum, Tensor ess, Tensor drawn, " FILTER_MODELS
         ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
         backward)
