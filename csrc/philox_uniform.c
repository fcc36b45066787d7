/* Schema and registration of philox_uniform. Contract: kernels/philox_uniform.h. */
#include "philox_uniform.h"

#include "seed.h"

static void forward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "philox_uniform"};
    PhiloxDraw p = {.n = take_int(stack[2])};
    Tensor seed = take_seed(&call, stack[0], stack[3], &p.seed);
    p.B = take_rows(&call, &seed, stack[1]);
    expect(&call, p.n >= 0, "n: expected a number >= 0, got %lld", (long long)p.n);
    Tensor like = real_like(&seed, take_int(stack[4]) != 0);
    Tensor out = new_tensor(&call, &like, 2, (int64_t[]){p.B, p.n});
    p.out = out.data;
    run(&call, &like, KERNELS(philox_uniform), &p, p.B * ((p.n + PHILOX_TILE - 1) / PHILOX_TILE), 16);
    finish(&call, stack, 1, (Tensor[]){out});
}
OPERATOR(philox_uniform, "philox_uniform(Tensor seed, SymInt rows, SymInt n, int stream, int is_double) -> Tensor", forward)
