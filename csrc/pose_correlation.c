/* Schema and registration of pose_correlation. Contract: kernels/pose_correlation.h. */
#include "pose_correlation.h"

#include "operator.h"

enum { CELLS_PER_TASK = 1 << 14 }; /* with 8 channels 30 us of work */

/* The arguments from map, stack[0], to padding, stack[9], checked; returns the poses. */
static Tensor take_arguments(Call *call, StableIValue *stack, PoseCorrelation *p, Tensor *map, Tensor *templates) {
    StableIValue inner;
    *map = take_tensor(call, stack[0], "map", 4);
    *templates = take_tensor(call, stack[1], "template", 4);
    const bool has_valid = take_optional(stack[2], &inner);
    const Tensor valid = has_valid ? take_flags(call, inner, "valid", 3) : (Tensor){0};
    Tensor poses = take_tensor(call, stack[3], "poses", 3);
    const Tensor map_index = take_indices(call, stack[4], "map_index", 1);
    const Tensor template_index = take_indices(call, stack[5], "template_index", 1);
    const int64_t *s = map->size, *t = templates->size;
    const Tensor *others[] = {map, templates, &map_index, &template_index, &valid};
    const char *names[] = {"map", "template", "map_index", "template_index", "valid"};
    for (int i = 0; i < 4 + has_valid; i++) expect_like(call, others[i], names[i], &poses, "poses");
    expect_size(call, templates, "template", 4, (int64_t[]){t[0], s[3], t[2], t[3]});
    expect_size(call, &poses, "poses", 3, (int64_t[]){poses.size[0], poses.size[1], 3});
    expect_size(call, &map_index, "map_index", 1, poses.size);
    expect_size(call, &template_index, "template_index", 1, poses.size);
    if (has_valid) expect_size(call, &valid, "valid", 3, (int64_t[]){t[0], t[2], t[3]});
    *p = (PoseCorrelation){.R = poses.size[0],
                           .N = poses.size[1],
                           .M = s[0],
                           .H = s[1],
                           .W = s[2],
                           .C = s[3],
                           .K = t[0],
                           .h = t[2],
                           .w = t[3],
                           .x0 = take_float(stack[6]),
                           .y0 = take_float(stack[7]),
                           .shift = take_float(stack[8]),
                           .replicate = take_int(stack[9]) == 1,
                           .map = map->data,
                           .templates = templates->data,
                           .poses = poses.data,
                           .valid = valid.data,
                           .map_index = map_index.data,
                           .template_index = template_index.data};
    expect(call, p->C > 0 && p->H > 0 && p->W > 0, "map: expected at least one pixel and channel");
    expect(call, p->h > 0 && p->w > 0, "template: expected at least one cell");
    expect(call, p->R == 0 || (p->M > 0 && p->K > 0), "map and template: expected at least one");
    expect(call, !ok(call) || pose_fits(p), "map: too large, or the template, or the origin too far from it");
    for (int64_t r = 0; ok(call) && !on_cuda(&poses) && r < p->R; r++) {
        const int64_t m = p->map_index[r], k = p->template_index[r];
        expect(call, m >= 0 && m < p->M, "map_index: expected 0 to %lld, got %lld", (long long)p->M - 1, (long long)m);
        expect(call, k >= 0 && k < p->K, "template_index: expected 0 to %lld, got %lld", (long long)p->K - 1, (long long)k);
    }
    return poses;
}

static void prepare(Call *call, const Tensor *poses, PoseCorrelation *p) {
    const int64_t real = poses->is_double ? 8 : 4, cells = p->K * pose_cells(p);
    p->x = new_scratch(call, poses, cells * real);
    p->y = new_scratch(call, poses, cells * real);
    if (on_cuda(poses) || !p->grad || p->grad_map) p->t = new_scratch(call, poses, cells * p->C * real);
    p->cell = new_scratch(call, poses, cells * 4);
    p->n_cells = new_scratch(call, poses, p->K * 8);
    if (!on_cuda(poses)) {
        p->tile = new_scratch(call, poses, p->K * pose_tiles(p) * (int64_t)sizeof(PoseTile));
        p->reach = new_scratch(call, poses, p->K * 8);
    }
    run(call, poses, KERNELS(pose_correlation_prepare), p, p->K, 1 + CELLS_PER_TASK / pose_cells(p));
}

static void forward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    Call call = {.op = "pose_correlation"};
    PoseCorrelation p;
    Tensor map, templates, poses = take_arguments(&call, stack, &p, &map, &templates);
    Tensor scores = new_tensor(&call, &poses, 2, poses.size);
    p.scores = scores.data;
    if (ok(&call)) prepare(&call, &poses, &p);
    run(&call, &poses, KERNELS(pose_correlation), &p, p.R * p.N, ok(&call) ? 1 + CELLS_PER_TASK / (p.h * p.w) : 1);
    finish(&call, stack, 1, (Tensor[]){scores});
}
OPERATOR(pose_correlation,
         "pose_correlation(Tensor map, Tensor templates, Tensor? valid, Tensor poses, Tensor map_index, Tensor template_index, "
         "float x0, float y0, float shift, int padding) -> Tensor",
         forward)

/* wanted: 1 for the map's gradient + 2 for those of templates and poses; the others have size 0. */
static void backward(StableIValue *stack, uint64_t n_args, uint64_t n_results) {
    (void)n_args, (void)n_results;
    static const int64_t none[4];
    Call call = {.op = "pose_correlation_backward"};
    PoseCorrelation p;
    Tensor grad = take_tensor(&call, stack[0], "grad", 2);
    Tensor map, templates, poses = take_arguments(&call, stack + 1, &p, &map, &templates);
    const bool want_map = take_int(stack[11]) & 1, want_others = take_int(stack[11]) & 2;
    expect_like(&call, &grad, "grad", &poses, "poses");
    expect_size(&call, &grad, "grad", 2, poses.size);
    Tensor grad_map = new_tensor(&call, &poses, 4, want_map ? map.size : none);
    Tensor grad_templates = new_tensor(&call, &poses, 4, want_others ? templates.size : none);
    Tensor grad_poses = new_tensor(&call, &poses, 3, want_others ? poses.size : none);
    p.grad = grad.data;
    p.grad_map = want_map ? grad_map.data : NULL;
    p.grad_templates = want_others ? grad_templates.data : NULL, p.grad_poses = want_others ? grad_poses.data : NULL;
    if (ok(&call)) {
        const int64_t real = poses.is_double ? 8 : 4, cells = p.K * pose_cells(&p), chunks = p.R * pose_chunks(&p);
        prepare(&call, &poses, &p);
        if (want_others && on_cuda(&poses)) p.cell_grad = new_scratch(&call, &poses, pose_parts(&p) * cells * p.C * real);
        if (want_others && !on_cuda(&poses)) p.pose_grad = new_scratch(&call, &poses, chunks * p.N * 3 * real);
        if (want_others) run(&call, &poses, KERNELS(pose_correlation_backward), &p, p.K * pose_chunks(&p), 1);
        if (want_others) run(&call, &poses, CPU_KERNELS(pose_correlation_sum), &p, p.R * p.N, CELLS_PER_TASK);
        if (want_map) run(&call, &poses, KERNELS(pose_correlation_map), &p, p.M * pose_bands(&p), 1);
    }
    finish(&call, stack, 3, (Tensor[]){grad_map, grad_templates, grad_poses});
}
OPERATOR(pose_correlation_backward,
         "pose_correlation_backward(Tensor grad, Tensor map, Tensor templates, Tensor? valid, Tensor poses, Tensor map_index, "
         "Tensor template_index, float x0, float y0, float shift, int padding, int wanted) -> (Tensor, Tensor, Tensor)",
         backward)
