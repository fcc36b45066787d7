/* Schema and registration of transport_resample. Contract: kernels/transport_resample.h. */
#include "transport_resample.h"

#include "operator.h"

enum { PAIRS_PER_TASK = 2048 }; /* about 15 passes over each: 20 us of work */

/* The parameters that both passes have, checked. */
static TransportResample take_row(Call *call, const Tensor *particles, const Tensor *log_weights, StableIValue epsilon,
                                  StableIValue n_angular) {
    const int64_t D = particles->size[2], A = take_n_angular(call, n_angular, D);
    TransportResample p = {.B = particles->size[0],
                           .N = particles->size[1],
                           .G = (int)(D - A),
                           .A = (int)A,
                           .epsilon = take_float(epsilon),
                           .particles = particles->data,
                           .log_weights = log_weights->data};
    expect_like(call, log_weights, "log_weights", particles, "particles");
    expect_size(call, log_weights, "log_weights", 2, particles->size);
    expect(call, p.N > 0, "particles: expected at least one particle, got 0");
    expect(call, p.epsilon > 0, "epsilon: expected a positive number, got %g", p.epsilon);
    return p;
}

static void take_scratch(Call *call, const Tensor *x, TransportResample *p, bool backward) {
    const int64_t size = x->is_double ? 8 : 4, rows = backward ? p->slots : p->B;
    p->scratch = new_scratch(
        call, x, on_cuda(x) ? transport_cuda_scratch(p, backward, size) : rows * transport_scratch(p, backward) * size);
}

static void forward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "transport_resample"};
    Tensor particles = take_tensor(&call, stack[0], "particles", 3);
    Tensor log_weights = take_tensor(&call, stack[1], "log_weights", 2);
    TransportResample p = take_row(&call, &particles, &log_weights, stack[2], stack[6]);
    p.scaling = take_float(stack[3]), p.threshold = take_float(stack[4]), p.max_iterations = take_int(stack[5]);
    expect(&call, p.scaling >= 0 && p.scaling < 1, "scaling: expected a number in [0, 1), got %g", p.scaling);
    Tensor transported = new_tensor(&call, &particles, 3, particles.size);
    Tensor marginal_error = new_tensor(&call, &particles, 1, particles.size);
    Tensor iterations = new_indices(&call, &particles, 1, particles.size);
    Tensor potentials = new_tensor(&call, &particles, 3, (int64_t[]){p.B, 2, p.N});
    p.transported = transported.data, p.marginal_error = marginal_error.data;
    p.iterations = iterations.data, p.potentials = potentials.data;
    take_scratch(&call, &particles, &p, false);
    run(&call, &particles, KERNELS(transport_resample), &p, p.B, 1 + PAIRS_PER_TASK / (p.N * p.N + 1));
    finish(&call, stack, 4, (Tensor[]){transported, marginal_error, iterations, potentials});
}
OPERATOR(transport_resample,
         "transport_resample(Tensor particles, Tensor log_weights, float epsilon, float scaling, float threshold, "
         "int max_iterations, int n_angular) -> (Tensor, Tensor, Tensor, Tensor)",
         forward)

static void backward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "transport_resample_backward"};
    Tensor grad = take_tensor(&call, stack[0], "grad", 3);
    Tensor particles = take_tensor(&call, stack[1], "particles", 3);
    Tensor log_weights = take_tensor(&call, stack[2], "log_weights", 2);
    Tensor potentials = take_tensor(&call, stack[3], "potentials", 3);
    TransportResample p = take_row(&call, &particles, &log_weights, stack[4], stack[5]);
    expect_like(&call, &grad, "grad", &particles, "particles");
    expect_like(&call, &potentials, "potentials", &particles, "particles");
    expect_size(&call, &grad, "grad", 3, particles.size);
    expect_size(&call, &potentials, "potentials", 3, (int64_t[]){p.B, 2, p.N});
    Tensor grad_particles = new_tensor(&call, &particles, 3, particles.size);
    Tensor grad_log_weights = new_tensor(&call, &particles, 2, log_weights.size);
    p.grad = grad.data, p.potentials = potentials.data;
    p.grad_particles = grad_particles.data, p.grad_log_weights = grad_log_weights.data;
    p.slots = transport_slots(p.B, p.N);
    take_scratch(&call, &particles, &p, true);
    run(&call, &particles, KERNELS(transport_resample_backward), &p, p.slots, 1 + PAIRS_PER_TASK / (p.N * p.N + 1));
    finish(&call, stack, 2, (Tensor[]){grad_particles, grad_log_weights});
}
OPERATOR(transport_resample_backward,
         "transport_resample_backward(Tensor grad, Tensor particles, Tensor log_weights, Tensor potentials, float epsilon, "
         "int n_angular) -> (Tensor, Tensor)",
         backward)
