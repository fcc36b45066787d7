/* small_network and its forms, move_poses and weigh_poses, as they are compiled for every instruction set that this machine
 * has, both types, against the baseline's doubles: elsewhere only the best set is tested. test_small_network.py compiles it
 * twice: as it is, and for the sanitizers with MDPS_NO_CLONES. Each array has the size that the contract says, so that the
 * address sanitizer sees a step beside it. */
#include "small_network.c"

#include <stdio.h>
#include <stdlib.h>

typedef void Pass(int64_t begin, int64_t end, void *parameters);
typedef struct {
    const char *name;
    Pass *prepare, *share, *forward, *backward, *finish;
    size_t size; /* of a number */
} Target;
#define TARGET_OF(name) \
    {#name, prepare_##name, share_##name, forward_##name, backward_##name, finish_##name, 4 << (#name[1] == '6')}

enum { RESULTS = 5 };
static double *expected[NETWORK_WEIGHS_POSES + 1][RESULTS]; /* of each form */

static void *numbers(int64_t n, size_t size, double scale) {
    void *x = aligned_alloc(64, (size_t)(n * size + 63) / 64 * 64);
    uint32_t state = 12345;
    for (int64_t i = 0; i < n; i++) {
        state = state * 1664525 + 1013904223;
        float value = (float)(scale * (state / 4294967296. - 0.5));
        if (size == 8) ((double *)x)[i] = value;
        else ((float *)x)[i] = value;
    }
    return x;
}

/* The largest difference from what the first target returned, relative to the largest number there. */
static double difference(double **expected, const void *x, int64_t n, size_t size) {
    if (!*expected) {
        *expected = numbers(n, sizeof(double), 0);
        memcpy(*expected, x, n * sizeof(double));
    }
    double worst = 0, largest = 1e-300;
    for (int64_t i = 0; i < n; i++) {
        double want = (*expected)[i], got = size == 8 ? ((const double *)x)[i] : ((const float *)x)[i];
        if (!(fabs(got - want) <= worst)) worst = fabs(got - want);
        if (fabs(want) > largest) largest = fabs(want);
    }
    return worst / largest;
}

static int check_form(const Target *t, int form) {
    const int in = form ? 3 : 6,
              out = form == NETWORK_WEIGHS_POSES ? 1
                    : form                       ? 3
                                                 : 2,
              last = form == NETWORK_MOVES_POSES ? 4 : out;
    SmallNetwork p = {.form = form,
                      .minimum = 1e-5,
                      .least_extra = -1,
                      .n_layers = 5,
                      .C = form == NETWORK_MOVES_POSES ? 2
                           : form                      ? 4
                                                       : 6,
                      .E = 3,
                      .K = 5,
                      .R = 2,
                      .B = 6,
                      .N = 1501,
                      .grad_y = &p,
                      .layer = {{.out = 13, .activation = NETWORK_RELU},
                                {.out = 8, .activation = NETWORK_TANH, .enters_extra = true},
                                {.out = 7, .activation = NETWORK_PRELU, .enters_condition = true},
                                {.out = 9, .activation = NETWORK_SIGMOID},
                                {.out = last, .activation = form ? NETWORK_SIGMOID : NETWORK_NONE}}};
    small_network_layout(&p);
    int64_t n = p.B * p.N, size[RESULTS] = {n * out, n * in, n * p.E, p.B * p.K, p.R * p.P};
    void *input[] = {numbers(n * in, t->size, 4),    numbers(n * p.E, t->size, 4), numbers(p.B * p.K, t->size, 4),
                     numbers(p.R * p.P, t->size, 1), numbers(n * out, t->size, 2), numbers(p.scratch_size, t->size, 0),
                     numbers(4, t->size, 2)};
    void *result[RESULTS];
    for (int i = 0; i < RESULTS; i++) result[i] = numbers(size[i], t->size, 0);
    p.x = input[0], p.extra = input[1], p.condition = input[2], p.weights = input[3], p.grad_y = input[4], p.scratch = input[5];
    p.scale = input[6];
    p.y = result[0], p.grad_x = result[1], p.grad_extra = result[2], p.grad_condition = result[3], p.grad_weights = result[4];
    t->prepare(0, p.R, &p);
    t->share(0, 2, &p);
    t->share(2, p.B, &p);
    t->forward(0, p.R * p.chunks, &p);
    t->backward(0, 1, &p); /* as two threads would */
    t->backward(1, p.R * p.chunks, &p);
    t->finish(0, p.R, &p);
    int bad = 0;
    for (int i = 0; i < RESULTS; i++) {
        double d = difference(&expected[form][i], result[i], size[i], t->size);
        bool much = !(d <= (t->size == 8 ? 1e-13 : 2e-5));
        printf("%-12s form %d result %d: %.1e%s\n", t->name, form, i, d, much ? " is too much" : "");
        bad |= much;
        free(result[i]);
    }
    for (int i = 0; i < 7; i++) free(input[i]);
    return bad;
}

static int check(const Target *t) {
    int bad = 0;
    for (int form = NETWORK_ALONE; form <= NETWORK_WEIGHS_POSES; form++) bad |= check_form(t, form);
    return bad;
}

int main(void) {
    Target targets[] = {TARGET_OF(f64_baseline), TARGET_OF(f32_baseline)};
    int bad = check(&targets[0]) | check(&targets[1]);
#ifdef HAS_TARGETS
    Target v3[] = {TARGET_OF(f64_v3), TARGET_OF(f32_v3)}, v4[] = {TARGET_OF(f64_v4), TARGET_OF(f32_v4)};
    if (__builtin_cpu_supports("x86-64-v3")) bad |= check(&v3[0]) | check(&v3[1]);
    if (__builtin_cpu_supports("x86-64-v4")) bad |= check(&v4[0]) | check(&v4[1]);
#endif
    for (int i = 0; i < 3 * RESULTS; i++) free(expected[i / RESULTS][i % RESULTS]);
    return bad;
}
