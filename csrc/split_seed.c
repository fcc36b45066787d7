/* Schema and registration of split_seed. Contract: kernels/split_seed.h. */
#include "split_seed.h"

#include "seed.h"

static void forward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "split_seed"};
    SplitSeed p = {.B = 1, .n = take_int(stack[1])};
    Tensor seed = take_seed(&call, stack[0], stack[2], &p.seed);
    if (seed.dim == 1) p.B = seed.size[0];
    expect(&call, p.n >= 0, "n: expected a number >= 0, got %lld", (long long)p.n);
    Tensor out = new_indices(&call, &seed, 2, (int64_t[]){p.B, p.n});
    p.out = out.data;
    run(&call, &seed, (Kernels){split_seed, split_seed, split_seed_cuda}, &p, p.B, ok(&call) ? 1 + 4096 / (p.n + 1) : 1);
    finish(&call, stack, 1, (Tensor[]){out});
}
OPERATOR(split_seed, "split_seed(Tensor seed, SymInt n, int stream) -> Tensor", forward)
