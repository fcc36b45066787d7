/* See network.h. Four integers describe a layer: whether extra enters it, whether condition does, the values it returns, its
 * activation. */
#include "network.h"

void expect_width(Call *call, const char *name, int64_t width) {
    expect(call, width >= 1 && width <= NETWORK_WIDTH, "%s: expected 1 to %d columns, got %lld", name, NETWORK_WIDTH,
           (long long)width);
}

/* extra (B, N, E) or condition (B, K), when given: its number of columns, or 0. */
static int take_given(Call *call, StableIValue value, const char *name, int dim, const Tensor *x, const char *x_name,
                      Tensor *given) {
    StableIValue inner;
    *given = (Tensor){0};
    if (!take_optional(value, &inner)) return 0;
    *given = take_tensor(call, inner, name, dim);
    int64_t columns = given->size[dim - 1];
    expect_like(call, given, name, x, x_name);
    expect_size(call, given, name, dim, (int64_t[]){x->size[0], dim == 3 ? x->size[1] : columns, columns});
    expect_width(call, name, columns);
    return ok(call) ? (int)columns : 0;
}

static void take_layers(Call *call, StableIValue value, const NetworkNames *names, SmallNetwork *p) {
    int64_t item[4 * NETWORK_LAYERS];
    int n = take_ints(call, value, names->layers, 4 * NETWORK_LAYERS, item), extra = 0, condition = 0;
    expect(call, n > 0 && n % 4 == 0, "%s: expected 4 integers for each of 1 to %d layers, got %d", names->layers,
           NETWORK_LAYERS, n);
    p->n_layers = ok(call) ? n / 4 : 0;
    for (int l = 0; l < p->n_layers; l++) {
        const int64_t *a = item + 4 * l;
        expect(call, (a[0] | a[1] | 1) == 1, "%s: expected 0 or 1 for whether extra and condition enter", names->layers);
        expect_width(call, names->layers, a[2]);
        expect(call, a[3] >= 0 && a[3] < NETWORK_ACTIVATIONS, "%s: expected an activation in [0, %d), got %lld", names->layers,
               NETWORK_ACTIVATIONS, (long long)a[3]);
        p->layer[l] = (NetworkLayer){.enters_extra = a[0], .enters_condition = a[1], .out = (int)a[2], .activation = (int)a[3]};
        extra += a[0] != 0;
        condition += a[1] != 0;
    }
    expect(call, extra == (p->E > 0), "%s: expected it to enter one layer if it is given and none if not, got %d", names->extra,
           extra);
    expect(call, condition == (p->K > 0), "%s: expected it to enter one layer if it is given and none if not, got %d",
           names->condition, condition);
}

Network take_network(Call *call, const StableIValue *values, const char *x_name, SmallNetwork *p, const Tensor *grad_y) {
    Network a = {.x = take_tensor(call, values[0], x_name, 3)};
    p->E = take_given(call, values[1], "extra", 3, &a.x, x_name, &a.extra);
    p->K = take_given(call, values[2], "condition", 2, &a.x, x_name, &a.condition);
    a.weights = take_shared_tensor(call, values[3], "weights", 2);
    const NetworkNames names = {x_name, "extra", "condition", "weights", "layers"};
    network_parameters(call, &a, &names, values[4], p, grad_y);
    network_prepare(call, &a, p);
    return a;
}

void network_layout(const Network *a, SmallNetwork *p) {
    network_inputs(a, p);
    p->B = a->x.size[0], p->N = a->x.size[1], p->R = network_sets(a);
    if (on_cuda(&a->x)) small_network_layout_cuda(p, a->x.is_double ? 8 : 4);
    else small_network_layout(p);
}

void network_parameters(Call *call, const Network *a, const NetworkNames *names, StableIValue layers, SmallNetwork *p,
                        const Tensor *grad_y) {
    take_layers(call, layers, names, p);
    expect_like(call, &a->weights, names->weights, &a->x, names->x);
    if (p->form == NETWORK_ALONE) {
        expect_width(call, names->x, a->x.size[2]);
        p->C = (int)a->x.size[2];
    } else expect(call, a->x.size[2] == 3, "%s: expected 3 columns, got %lld", names->x, (long long)a->x.size[2]);
    const int64_t rows = a->x.size[0], sets = network_sets(a);
    expect(call, sets > 0 && rows % sets == 0, "%s: expected a number of sets that divides the %lld rows of %s, got %lld",
           names->weights, (long long)rows, names->x, (long long)sets);
    if (!ok(call)) {
        p->n_layers = 0;
        return;
    }
    p->grad_y = grad_y ? grad_y->data : NULL;
    network_layout(a, p);
    const int64_t n = a->weights.size[a->weights.dim - 1];
    expect(call, n == p->P, "%s: expected %lld parameters, got %lld", names->weights, (long long)p->P, (long long)n);
}

void network_prepare(Call *call, const Network *a, SmallNetwork *p) {
    if (!ok(call)) return;
    if (p->scratch_size > 0) p->scratch = new_scratch(call, &a->x, p->scratch_size * (a->x.is_double ? 8 : 4));
    run(call, &a->x, CPU_KERNELS(small_network_prepare), p, p->R, 1);
}

void expect_shares(Call *call, const SmallNetwork *p, int out) {
    if (!ok(call)) return;
    const NetworkLayer *last = &p->layer[p->n_layers - 1];
    expect(call, last->out == out && last->activation == NETWORK_SIGMOID,
           "layers: expected the last to return %d columns after a sigmoid, got %d and activation %d", out, last->out,
           last->activation);
}

void network_forward(Call *call, const Network *a, SmallNetwork *p, Launcher *cuda) {
    if (p->conditioned >= 0) run(call, &a->x, CPU_KERNELS(small_network_share), p, p->B, 64);
    run(call, &a->x, (Kernels){small_network_forward_f32, small_network_forward_f64, cuda}, p, p->R * p->chunks, 1);
}

NetworkGradients network_backward(Call *call, const Network *a, SmallNetwork *p, int64_t wanted, Launcher *cuda) {
    static const int64_t none[3];
    const bool want_x = wanted & 1, want_extra = (wanted & 2) && p->E;
    NetworkGradients grad = {
        new_tensor(call, &a->x, 3, want_x ? a->x.size : none), new_tensor(call, &a->x, 3, want_extra ? a->extra.size : none),
        new_tensor(call, &a->x, 2, a->condition.size), new_tensor(call, &a->x, (int)a->weights.dim, a->weights.size)};
    p->grad_x = want_x ? grad.x.data : NULL;
    p->grad_extra = want_extra ? grad.extra.data : NULL;
    p->grad_condition = grad.condition.data, p->grad_weights = grad.weights.data;
    if (p->conditioned >= 0) run(call, &a->x, CPU_KERNELS(small_network_share), p, p->B, 64);
    run(call, &a->x, (Kernels){small_network_backward_f32, small_network_backward_f64, cuda}, p,
        on_cuda(&a->x) ? p->R : p->R * p->chunks, 1); /* CUDA: and finish */
    run(call, &a->x, CPU_KERNELS(small_network_finish), p, p->R, 1);
    return grad;
}
