/* Schema and registration of find_modes. Contract: kernels/find_modes.h. */
#include "find_modes.h"

#include "mixture_cuda.h"
#include "operator.h"

/* Scratch memory: on the GPU for starts, their densities, and every row's search; on the CPU for every chunk's. */
static void take_scratch(Call *call, const Tensor *means, FindModes *p) {
    const int64_t real = means->is_double ? 8 : 4, B = p->mixture.B, N = p->mixture.N;
    const int64_t D = p->mixture.G + p->mixture.A;
    if (!on_cuda(means)) {
        p->scratch = new_scratch(call, means, find_modes_chunks(p) * find_modes_bytes(p, real));
        return;
    }
    MixturePlan plan;
    p->mixture.x = new_scratch(call, means, B * N * D * real);
    p->mixture.log_prob = new_scratch(call, means, B * N * real);
    p->mixture.log2_sum = new_scratch(call, means, B * N * real);
    p->mixture.scratch = new_scratch(call, means, mixture_plan(&plan, &p->mixture, means->is_double, 0));
    p->found = new_scratch(call, means, B * find_modes_most(p) * (1 + D) * 8);
}

static void forward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "find_modes"};
    Tensor means = take_tensor(&call, stack[0], "means", 3);
    Tensor log_weights = take_tensor(&call, stack[1], "log_weights", 2);
    Tensor bandwidths = take_shared_tensor(&call, stack[2], "bandwidths", 2);
    const int64_t B = means.size[0], N = means.size[1], D = means.size[2], K = take_int(stack[3]);
    FindModes p = {.K = K};
    const int n_radii = take_floats(&call, stack[4], "radii", p.radius);
    const int A = take_n_angular(&call, stack[5], D);
    expect_like(&call, &log_weights, "log_weights", &means, "means");
    expect_like(&call, &bandwidths, "bandwidths", &means, "means");
    expect_size(&call, &log_weights, "log_weights", 2, means.size);
    expect_size(&call, &bandwidths, "bandwidths", 2, (int64_t[]){B, D});
    expect(&call, N > 0, "means: expected at least one component, got 0");
    expect(&call, K > 0, "n_modes: expected at least 1, got %lld", (long long)K);
    expect(&call, n_radii == D, "radii: expected %lld numbers, got %d", (long long)D, n_radii);
    for (int d = 0; d < n_radii; d++) expect(&call, p.radius[d] >= 0, "radii: expected numbers >= 0, got %g", p.radius[d]);
    p.mixture = (MixtureLogProb){.B = B,
                                 .M = N,
                                 .N = N,
                                 .G = (int)D - A,
                                 .A = A,
                                 .bandwidth_stride = bandwidths.dim == 2 ? D : 0,
                                 .means = means.data,
                                 .log_weights = log_weights.data,
                                 .bandwidths = bandwidths.data};
    if (ok(&call) && !on_cuda(&means)) {
        int64_t bad = (means.is_double ? mixture_bad_bandwidth_f64 : mixture_bad_bandwidth_f32)(&p.mixture);
        expect(&call, bad < 0, "bandwidths: expected positive finite numbers, got another one in row %lld", (long long)bad);
    }
    Tensor modes = new_tensor(&call, &means, 3, (int64_t[]){B, K, D});
    Tensor log_densities = new_tensor(&call, &means, 2, (int64_t[]){B, K});
    p.modes = modes.data, p.log_densities = log_densities.data;
    if (ok(&call)) take_scratch(&call, &means, &p);
    const int64_t chunks = ok(&call) ? find_modes_chunks(&p) : 0;
    run(&call, &means, KERNELS(find_modes), &p, chunks, chunks ? 1 + 65536 / (N * (N + 64) * (B / chunks)) : 1);
    finish(&call, stack, 2, (Tensor[]){modes, log_densities});
}
OPERATOR(find_modes,
         "find_modes(Tensor means, Tensor log_weights, Tensor bandwidths, SymInt n_modes, float[] radii, int n_angular) -> "
         "(Tensor, Tensor)",
         forward)
