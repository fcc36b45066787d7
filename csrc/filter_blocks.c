/* See filter_blocks.h. */
#include "filter_blocks.h"

#include "filter_steps.h"

/* Particles of a block, about, where there are as many; blocks of all sets, unless there are more sets; particles of a block
 * that are worth many threads. */
enum { BLOCK_PARTICLES = 1024, MOST_BLOCKS = 256, MANY_PARTICLES = 1 << 14 };

/* The least common multiple of the networks' numbers of sets, which divide the number of rows. */
static int64_t common_sets(const FilterModels *m) {
    const int64_t a = network_sets(&m->move), b = network_sets(&m->weigh);
    int64_t sets = a;
    while (sets % b) sets += a;
    return sets;
}

FilterBlocks filter_blocks(Call *call, const FilterModels *all) {
    if (!ok(call) || all->n == 0) return (FilterBlocks){0};
    if (on_cuda(&all->move.x)) return (FilterBlocks){.n = 1, .of_set = 1, .rows_of_set = all->n};
    const int64_t sets = common_sets(all), rows = all->n / sets, N = all->move.x.size[1];
    const int64_t least = (BLOCK_PARTICLES + N - 1) / N;
    FilterBlocks b = {.of_set = 1, .rows_of_set = rows};
    while (2 * b.of_set * least <= rows && 2 * b.of_set * sets <= MOST_BLOCKS) b.of_set *= 2;
    b.n = sets * b.of_set;
    return b;
}

/* Its first row; of block n: the number of rows. */
static int64_t first_row(const FilterBlocks *b, int64_t i) {
    return i / b->of_set * b->rows_of_set + i % b->of_set * b->rows_of_set / b->of_set;
}

typedef struct {
    const FilterBlocks *blocks;
    const FilterModels *all;
    BlockWork *work;
    void *parameters;
} Task;

static void run_block(Call *call, int64_t i, void *parameters) {
    const Task *t = parameters;
    const int64_t first = first_row(t->blocks, i), next = first_row(t->blocks, i + 1);
    FilterModels m = models_of_rows(call, t->all, first, next - first);
    if (ok(call)) t->work(call, &m, i, t->parameters);
}

/* Few large blocks for many threads go one after the other, and threads share the work of each step. */
void each_block(Call *call, const FilterBlocks *b, const FilterModels *all, BlockWork *work, void *parameters) {
    Task task = {b, all, work, parameters};
    const bool large = b->n && all->n / b->n * all->move.x.size[1] >= MANY_PARTICLES;
    run_parts(call, run_block, &task, b->n, large && has_threads(2 * b->n));
}

Tensor new_sums(Call *call, const FilterBlocks *b, const Tensor *gradient) {
    const bool of_all = gradient->dim == 2 && on_cuda(gradient);
    const int64_t numbers = gradient->size[gradient->dim == 2] * (of_all ? gradient->size[0] : 1);
    Tensor sums = new_tensor(call, gradient, 2, (int64_t[]){b->n, numbers});
    add_up(call, sums, (Tensor){0}, (Tensor){0});
    return sums;
}

void add_sums(Call *call, const FilterBlocks *b, const Tensor *sums, Tensor gradient) {
    if (!ok(call)) return;
    const int64_t sets = gradient.dim == 2 ? gradient.size[0] * gradient.size[1] / sums->size[1] : 1;
    add_up(call, gradient, (Tensor){0}, (Tensor){0});
    gradient.dim = 2, gradient.size[0] = sets, gradient.size[1] = sums->size[1];
    for (int64_t i = 0; i < b->n; i++) {
        const Tensor sum = item_of(&gradient, i * sets / b->n);
        add_up(call, sum, sum, item_of(sums, i));
    }
}
