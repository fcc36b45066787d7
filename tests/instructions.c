/* The cases of test_instructions.py. Each runs once, which binds libm's functions, and again between two calls of mark(), where
 * callgrind writes what it has counted: a run, and less than 50 instructions beside it. Prints the cases in order with the
 * number of units (pairs, draws, ...) of a run.
 */
#include "mixture_log_prob.h"
#include "mixture_resample.h"
#include "normalize_log_weights.h"
#include "philox_normal.h"
#include "philox_von_mises.h"
#include "pose_correlation.h"
#include "resample.h"
#include "small_network.h"
#include "transport_resample.h"
#include "two_filter_log_prob.h"

#include <stdio.h>
#include <stdlib.h>

enum { G = 2, A = 1, D = G + A };

__attribute__((noinline)) void mark(void) { __asm__ volatile(""); }

static const int64_t seed = 12345;

/* n numbers of `size` bytes, uniform in [low, high). */
static void *numbers(int64_t n, size_t size, double low, double high) {
    static uint32_t state = 1;
    void *x = aligned_alloc(64, ((size_t)n * size + 64) / 64 * 64);
    for (int64_t i = 0; i < n; i++) {
        state = state * 1664525 + 1013904223;
        double value = low + (high - low) * (state / 4294967296.);
        if (size == 8) ((double *)x)[i] = value;
        else ((float *)x)[i] = (float)value;
    }
    return x;
}

typedef void Run(void *parameters);

static void measure(const char *name, int64_t units, Run *run, void *parameters) {
    run(parameters);
    mark();
    run(parameters);
    mark();
    printf("%lld %s\n", (long long)units, name);
}

static void mixture_forward_f32(void *parameters) {
    MixtureLogProb *p = parameters;
    if (!mixture_is_short(p)) mixture_prepare_f32(0, p->B, p);
    mixture_log_prob_f32(0, mixture_forward_items(p), p);
}
static void mixture_forward_f64(void *parameters) {
    MixtureLogProb *p = parameters;
    mixture_prepare_f64(0, p->B, p);
    mixture_log_prob_f64(0, mixture_forward_items(p), p);
}
static void mixture_backward_f32(void *parameters) {
    MixtureLogProb p = *(MixtureLogProb *)parameters;
    p.log_prob = NULL; /* log2_sum is forward's */
    if (!mixture_is_short(&p)) mixture_prepare_f32(0, p.B, &p);
    mixture_backward_pairs_f32(0, mixture_backward_items(&p), &p);
    if (!mixture_is_short(&p)) mixture_backward_reduce_f32(0, p.B, &p);
    mixture_backward_share_f32(0, 1, &p);
}
/* As iwsg_log_weights does it for short rows. */
static void iwsg_backward_f32(void *parameters) {
    MixtureLogProb p = *(MixtureLogProb *)parameters;
    p.grad_x = NULL;
    mixture_backward_pairs_f32(0, p.B, &p);
    mixture_backward_share_f32(0, 1, &p);
}
/* As two_filter_log_prob does it, with the same mixture twice. */
static void two_filter_f32(void *parameters) {
    MixtureLogProb *p = parameters;
    TwoFilterLogProb q = {.log_forward = p->log_prob, .log_backward = p->log_prob, .log_proposal = p->log_prob};
    two_filter_mix(&q, 0.5);
    mixture_forward_f32(p), mixture_forward_f32(p);
    two_filter_log_prob_f32(0, p->B * p->M, &q);
}
static void two_filter_backward_f32(void *parameters) { mixture_backward_f32(parameters), mixture_backward_f32(parameters); }

/* B mixtures of n poses at m points. */
static MixtureLogProb mixture(int64_t B, int64_t m, int64_t n, size_t size) {
    MixtureLogProb p = {.B = B, .M = m, .N = n, .G = G, .A = A};
    p.x = numbers(B * m * D, size, -2, 2);
    p.means = numbers(B * n * D, size, -2, 2);
    p.log_weights = numbers(B * n, size, -4, 0);
    p.bandwidths = numbers(D, size, 0.3, 0.5);
    p.grad = numbers(B * m, size, -1, 1);
    p.log_prob = numbers(B * m, size, 0, 0), p.log2_sum = numbers(B * m, size, 0, 0);
    p.grad_x = numbers(B * m * D, size, 0, 0), p.grad_means = numbers(B * n * D, size, 0, 0);
    p.grad_log_weights = numbers(B * n, size, 0, 0), p.grad_bandwidths = numbers(D, size, 0, 0);
    p.rows = aligned_alloc(64, ((size_t)B * sizeof(MixtureRow) + 64) / 64 * 64);
    p.components = numbers(B * mixture_padded(n) * (1 + mixture_features(&p)), size, 0, 0);
    p.sums = numbers(B * mixture_row_sums(&p), 8, 0, 0);
    return p;
}

static void mixtures(void) {
    MixtureLogProb large = mixture(1, 1000, 1000, 4), small = mixture(32, 50, 50, 4), wide = mixture(8, 100, 50, 4);
    MixtureLogProb precise = mixture(1, 1000, 1000, 8);
    measure("mixture forward f32 1000", 1000 * 1000, mixture_forward_f32, &large);
    measure("mixture backward f32 1000", 1000 * 1000, mixture_backward_f32, &large);
    measure("mixture forward f32 50", 32 * 50 * 50, mixture_forward_f32, &small);
    measure("mixture backward f32 50", 32 * 50 * 50, mixture_backward_f32, &small);
    measure("iwsg backward f32 32 x 50 x 50", 32 * 50 * 50, iwsg_backward_f32, &small);
    measure("two_filter f32 8 x 100 x 50", 2 * 8 * 100 * 50, two_filter_f32, &wide);
    measure("two_filter backward f32 8 x 100 x 50", 2 * 8 * 100 * 50, two_filter_backward_f32, &wide);
    measure("mixture forward f64 1000", 1000 * 1000, mixture_forward_f64, &precise);
}

static void run_resample(void *parameters) {
    Resample *p = parameters;
    resample_f32(0, p->chunks, p);
}

static void resampling(void) {
    const char *schemes[] = {"multinomial", "stratified", "systematic", "residual"};
    for (int64_t n = 1000; n <= 100000; n *= 100)
        for (int scheme = 0; scheme < 4; scheme++) {
            Resample p = {.B = 1, .N = n, .M = n, .chunks = 1, .scheme = scheme, .seed = {&seed, 0, 0}};
            char name[64];
            p.log_weights = numbers(p.B * n, 4, -4, 0), p.ancestors = numbers(p.B * n, 8, 0, 0);
            p.scratch = numbers(RESAMPLE_SCRATCH(n) / 8, 8, 0, 0);
            snprintf(name, sizeof name, "resample %s %lld", schemes[scheme], (long long)n);
            measure(name, p.B * n, run_resample, &p);
        }
}

/* As mixture_resample does it. */
static void run_poses(void *parameters) {
    MixtureResample *p = parameters;
    resample_f32(0, p->resample.chunks, &p->resample);
    mixture_resample_f32(0, p->resample.B * ((p->resample.M + MIXTURE_DRAWS - 1) / MIXTURE_DRAWS), p);
}

/* B rows of n poses, n draws each. */
static void poses(const char *name, int64_t B, int64_t n) {
    MixtureResample p = {
        .resample = {.B = B, .N = n, .M = n, .chunks = B, .scheme = STRATIFIED, .seed = {&seed, 0, 0}}, .D = D, .A = A};
    p.resample.log_weights = numbers(B * n, 4, -4, 0), p.resample.ancestors = numbers(B * n, 8, 0, 0);
    p.means = numbers(B * n * D, 4, -2, 2), p.bandwidths = numbers(D, 4, 0.3, 0.5), p.samples = numbers(B * n * D, 4, 0, 0);
    measure(name, B * n, run_poses, &p);
}

static void run_normal(void *parameters) {
    PhiloxDraw *p = parameters;
    philox_normal_f32(0, (p->n + PHILOX_TILE - 1) / PHILOX_TILE, p);
}
static void run_von_mises(void *parameters) {
    PhiloxVonMises *p = parameters;
    philox_von_mises_f32(0, (p->n + VON_MISES_TILE - 1) / VON_MISES_TILE, p);
}
static void run_normalize(void *parameters) {
    NormalizeLogWeights *p = parameters;
    normalize_log_weights_f32(0, p->B, p);
}

static void rows(void) {
    PhiloxDraw normal = {.B = 1, .n = 100000, .seed = {&seed, 0, 0}, .out = numbers(100000, 4, 0, 0)};
    measure("philox_normal", normal.n, run_normal, &normal);
    PhiloxVonMises von_mises = {.B = 1, .n = 20000, .seed = {&seed, 0, 0}, .out = numbers(20000, 4, 0, 0)};
    von_mises.concentration = numbers(von_mises.n, 4, 0, 50);
    measure("philox_von_mises", von_mises.n, run_von_mises, &von_mises);
    NormalizeLogWeights p = {
        .B = 32, .N = 1000, .log_weights = numbers(32000, 4, -4, 0), .normalized = numbers(32000, 4, 0, 0)};
    p.log_sum = numbers(32, 4, 0, 0), p.ess = numbers(32, 4, 0, 0);
    measure("normalize_log_weights", p.B * p.N, run_normalize, &p);
}

static void run_network(void *parameters) {
    SmallNetwork *p = parameters;
    small_network_prepare_f32(0, p->R, p);
    small_network_share_f32(0, p->B, p);
    small_network_forward_f32(0, p->R * p->chunks, p);
    small_network_backward_f32(0, p->R * p->chunks, p);
    small_network_finish_f32(0, p->R, p);
}

static void network(const char *name, SmallNetwork p) {
    const int in = p.form ? 3 : p.C, last = p.layer[p.n_layers - 1].out, out = p.form == NETWORK_MOVES_POSES ? 3 : last;
    p.B = 32, p.N = 100, p.R = 1;
    const int64_t n = p.B * p.N;
    p.grad_y = numbers(n * out, 4, -1, 1);
    small_network_layout(&p);
    p.x = numbers(n * in, 4, -2, 2), p.extra = numbers(n * p.E, 4, -2, 2), p.condition = numbers(p.B * p.K, 4, -1, 1);
    p.weights = numbers(p.P, 4, -1, 1), p.scale = numbers(4, 4, 1, 2);
    p.y = numbers(n * out, 4, 0, 0), p.grad_x = numbers(n * in, 4, 0, 0), p.grad_extra = numbers(n * p.E, 4, 0, 0);
    p.grad_condition = numbers(p.B * p.K, 4, 0, 0), p.grad_weights = numbers(p.P, 4, 0, 0);
    p.scratch = numbers(p.scratch_size, 4, 0, 0);
    measure(name, n, run_network, &p);
}

/* A small model of dynamics; then the networks of the bearings-only task, of the dynamics with and without the poses. */
static void networks(void) {
    const NetworkLayer relu = {.out = 8, .activation = NETWORK_RELU}, none = {.out = 8, .activation = NETWORK_NONE};
    const NetworkLayer with_extra = {.out = 8, .activation = NETWORK_RELU, .enters_extra = true};
    const NetworkLayer with_condition = {.out = 8, .activation = NETWORK_RELU, .enters_condition = true};
    SmallNetwork model = {.n_layers = 3, .C = 4, .E = 3, .layer = {relu, with_extra, {.out = 3, .activation = NETWORK_NONE}}};
    SmallNetwork dynamics = {
        .n_layers = 8,
        .C = 2,
        .E = 4,
        .layer = {relu, relu, relu, none, with_extra, relu, relu, {.out = 4, .activation = NETWORK_SIGMOID}}};
    SmallNetwork measurement = {.n_layers = 6,
                                .C = 4,
                                .K = 8,
                                .minimum = 1e-5,
                                .layer = {relu, relu, relu, with_condition, relu, {.out = 1, .activation = NETWORK_SIGMOID}}};
    network("small_network", model);
    network("small_network, dynamics", dynamics);
    dynamics.form = NETWORK_MOVES_POSES;
    network("move_poses, dynamics", dynamics);
    network("small_network, measurement", measurement);
    measurement.form = NETWORK_WEIGHS_POSES;
    network("weigh_poses, measurement", measurement);
}

static void run_transport(void *parameters) {
    TransportResample *p = parameters;
    transport_resample_f32(0, p->B, p);
}
static void run_transport_backward(void *parameters) {
    TransportResample *p = parameters;
    transport_resample_backward_f32(0, p->slots, p);
}

/* 15 steps forward, whatever has converged, on B clouds of n poses. */
static void transports(void) {
    for (int64_t n = 50; n <= 250; n += 200) {
        TransportResample p = {
            .B = 4, .N = n, .G = G, .A = A, .epsilon = 0.5, .scaling = 0.9, .max_iterations = 15, .slots = 4};
        char name[64];
        p.particles = numbers(p.B * n * D, 4, -2, 2), p.log_weights = numbers(p.B * n, 4, -4, 0);
        p.transported = numbers(p.B * n * D, 4, 0, 0), p.marginal_error = numbers(p.B, 4, 0, 0);
        p.potentials = numbers(2 * p.B * n, 4, 0, 0), p.iterations = numbers(p.B, 8, 0, 0);
        p.grad = numbers(p.B * n * D, 4, -1, 1);
        p.grad_particles = numbers(p.B * n * D, 4, 0, 0), p.grad_log_weights = numbers(p.B * n, 4, 0, 0);
        p.scratch = numbers(p.B * transport_scratch(&p, true), 4, 0, 0);
        snprintf(name, sizeof name, "transport forward %lld", (long long)n);
        measure(name, p.B * n * n * 15, run_transport, &p);
        snprintf(name, sizeof name, "transport backward %lld", (long long)n);
        measure(name, p.B * n * n, run_transport_backward, &p);
    }
}

static void run_scores(void *parameters) {
    PoseCorrelation *p = parameters;
    pose_correlation_f32(0, p->R * p->N, p);
}
static void run_scores_backward(void *parameters) {
    PoseCorrelation *p = parameters;
    pose_correlation_backward_f32(0, p->K * pose_chunks(p), p);
    pose_correlation_sum_f32(0, p->R * p->N, p);
}
static void run_scores_map(void *parameters) {
    PoseCorrelation *p = parameters;
    pose_correlation_map_f32(0, p->M * pose_bands(p), p);
}

/* 40 poses, 8 channels, 64 x 129 cells of which a sector of 90 degrees is valid, in a map that they stay inside of, or in one
 * of which they see the border everywhere.
 */
static void scores(void) {
    static const int64_t zero = 0;
    static bool valid[64 * 129];
    int64_t cells = 0;
    for (int64_t i = 0; i < 64; i++)
        for (int64_t j = 0; j < 129; j++) cells += valid[i * 129 + j] = llabs(j - 64) <= 64 - i;
    PoseCorrelation p = {.R = 1, .N = 40, .M = 1, .H = 256, .W = 256, .K = 1, .C = 8, .h = 64, .w = 129, .x0 = 64, .y0 = 64};
    p.map = numbers(p.H * p.W * p.C, 4, -1, 1), p.templates = numbers(p.C * p.h * p.w, 4, -1, 1), p.valid = valid;
    float *poses = numbers(p.N * 3, 4, 0, 1);
    for (int64_t n = 0; n < p.N; n++) {
        poses[3 * n] = 118 + 20 * poses[3 * n], poses[3 * n + 1] = 118 + 20 * poses[3 * n + 1];
        poses[3 * n + 2] *= 6.28f;
    }
    p.poses = poses, p.map_index = &zero, p.template_index = &zero;
    p.scores = numbers(p.N, 4, 0, 0), p.grad = numbers(p.N, 4, -1, 1), p.grad_map = numbers(p.H * p.W * p.C, 4, 0, 0);
    p.grad_templates = numbers(p.C * p.h * p.w, 4, 0, 0), p.grad_poses = numbers(p.N * 3, 4, 0, 0);
    p.x = numbers(pose_cells(&p), 4, 0, 0), p.y = numbers(pose_cells(&p), 4, 0, 0);
    p.t = numbers(pose_cells(&p) * p.C, 4, 0, 0), p.cell = numbers(pose_cells(&p), 4, 0, 0), p.n_cells = numbers(1, 8, 0, 0),
    p.reach = numbers(1, 8, 0, 0);
    p.tile = numbers(pose_tiles(&p) * 3, 8, 0, 0), p.pose_grad = numbers(pose_chunks(&p) * p.N * 3, 4, 0, 0);
    pose_correlation_prepare_f32(0, p.K, &p);
    measure("pose_correlation forward", p.N * cells, run_scores, &p);
    measure("pose_correlation backward", p.N * cells, run_scores_backward, &p);
    measure("pose_correlation backward, map", p.N * cells, run_scores_map, &p);
    for (int64_t n = 0; n < 2 * p.N; n++) poses[n / 2 * 3 + n % 2] -= 114;
    p.H = 8, p.W = 8, p.replicate = true;
    measure("pose_correlation forward, border", p.N * cells, run_scores, &p);
    measure("pose_correlation backward, border", p.N * cells, run_scores_backward, &p);
    measure("pose_correlation backward, map, border", p.N * cells, run_scores_map, &p);
}

int main(void) {
    mixtures();
    resampling();
    poses("mixture_resample 32 x 50 poses", 32, 50);
    poses("mixture_resample 1000 poses", 1, 1000);
    rows();
    networks();
    transports();
    scores();
    return 0;
}
