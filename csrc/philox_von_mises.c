/* Schema and registration of philox_von_mises. Contract: kernels/philox_von_mises.h. */
#include "philox_von_mises.h"

#include "seed.h"

static void forward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "philox_von_mises"};
    PhiloxVonMises p = {0};
    Tensor concentration = take_tensor(&call, stack[0], "concentration", 2);
    Tensor seed = take_seed(&call, stack[1], stack[2], &p.seed);
    expect_like(&call, &seed, "seed", &concentration, "concentration");
    expect_size(&call, &seed, "seed", 1, concentration.size);
    p.B = concentration.size[0], p.n = concentration.size[1];
    expect(&call, p.n <= UINT32_MAX, "concentration: expected fewer than 2^32 numbers a row, got %lld", (long long)p.n);
    Tensor out = new_tensor(&call, &concentration, 2, concentration.size);
    p.concentration = concentration.data, p.out = out.data;
    int64_t tiles = (p.n + VON_MISES_TILE - 1) / VON_MISES_TILE;
    run(&call, &concentration, KERNELS(philox_von_mises), &p, p.B * tiles, 8);
    finish(&call, stack, 1, (Tensor[]){out});
}
OPERATOR(philox_von_mises, "philox_von_mises(Tensor concentration, Tensor seed, int stream) -> Tensor", forward)
