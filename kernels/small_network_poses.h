/* Poses (x, y, heading) before and behind the layers, on a tile; included for each type and target by small_network_passes.h.
 * Contracts: move_poses.h, weigh_poses.h.
 *
 * Three rows of the tile, from pose_row on, hold the poses, then the moved poses or the logs, and backward the gradient of the
 * poses as it comes together. The direction, sine and cosine of the heading, is the last two inputs of the first layer.
 */

static REAL *ON(pose_rows)(const ON(Tile) * t) { return t->rows + t->p->pose_row * TILE; }
static REAL *ON(direction_rows)(const ON(Tile) * t) { return t->rows + (t->p->C - 2) * TILE; }
static REAL *ON(output_rows)(const ON(Tile) * t) {
    const NetworkLayer *last = &t->p->layer[t->p->n_layers - 1];
    return t->rows + (last->row + last->joined) * TILE;
}

static void ON(load_poses)(const ON(Tile) * t) {
    const SmallNetwork *p = t->p;
    REAL *pose = ON(pose_rows)(t), *direction = ON(direction_rows)(t);
    ON(load)(3, t->n, t->nv, 1, (const REAL *)p->x + t->row * 3, pose);
    if (p->form == NETWORK_WEIGHS_POSES) memcpy(t->rows, pose, 2 * TILE * sizeof *pose);
#pragma omp simd
    for (int i = 0; i < t->nv * LANES; i++) FN(sine_cosine)(pose[2 * TILE + i], &direction[i], &direction[TILE + i]);
}

static void ON(store_moved)(const ON(Tile) * t) {
    const REAL *share = ON(output_rows)(t), *direction = ON(direction_rows)(t);
    REAL *pose = ON(pose_rows)(t), scale[4];
    memcpy(scale, t->p->scale, sizeof scale);
#pragma omp simd
    for (int i = 0; i < t->nv * LANES; i++) {
        pose[i] = FN(stepped)(pose[i], scale[0], share[i]);
        pose[TILE + i] = FN(stepped)(pose[TILE + i], scale[1], share[TILE + i]);
        REAL sine = FN(stepped)(direction[i], scale[2], share[2 * TILE + i]);
        REAL cosine = FN(stepped)(direction[TILE + i], scale[3], share[3 * TILE + i]);
        pose[2 * TILE + i] = FN(heading_of)(sine, cosine);
    }
    ON(store)(3, t->n, pose, (REAL *)t->p->y + t->row * 3);
}

/* d becomes the gradient of the shares; in the pose rows stays what reaches the poses past the layers. */
static void ON(load_moved_gradient)(const ON(Tile) * t, REAL *d) {
    const REAL *share = ON(output_rows)(t), *direction = ON(direction_rows)(t);
    REAL *grad = ON(pose_rows)(t), scale[4];
    memcpy(scale, t->p->scale, sizeof scale);
    ON(load)(3, t->n, t->nv, 0, (const REAL *)t->p->grad_y + t->row * 3, grad);
#pragma omp simd
    for (int i = 0; i < t->nv * LANES; i++) {
        REAL sine = FN(stepped)(direction[i], scale[2], share[2 * TILE + i]), grad_sine;
        REAL cosine = FN(stepped)(direction[TILE + i], scale[3], share[3 * TILE + i]), grad_cosine;
        FN(heading_gradient)(grad[2 * TILE + i], sine, cosine, &grad_sine, &grad_cosine);
        d[i] = 2 * scale[0] * grad[i];
        d[TILE + i] = 2 * scale[1] * grad[TILE + i];
        d[2 * TILE + i] = 2 * scale[2] * grad_sine;
        d[3 * TILE + i] = 2 * scale[3] * grad_cosine;
        grad[2 * TILE + i] = grad_sine * direction[TILE + i] - grad_cosine * direction[i];
    }
}

static void ON(store_logs)(const ON(Tile) * t) {
    const REAL *share = ON(output_rows)(t), minimum = (REAL)t->p->minimum;
    REAL *log = ON(pose_rows)(t);
#pragma omp simd
    for (int i = 0; i < t->nv * LANES; i++) log[i] = FN(log_of_share)(share[i], minimum);
    ON(store)(1, t->n, log, (REAL *)t->p->y + t->row);
}

static void ON(load_log_gradient)(const ON(Tile) * t, REAL *d) {
    const REAL *share = ON(output_rows)(t), minimum = (REAL)t->p->minimum;
    ON(load)(1, t->n, t->nv, 0, (const REAL *)t->p->grad_y + t->row, d);
#pragma omp simd
    for (int i = 0; i < t->nv * LANES; i++) d[i] = FN(share_gradient)(d[i], share[i], minimum);
    memset(ON(pose_rows)(t) + 2 * TILE, 0, TILE * sizeof *d);
}

/* d: the gradient of the first layer's inputs. */
static void ON(store_pose_gradient)(const ON(Tile) * t, const REAL *d) {
    const REAL *direction = ON(direction_rows)(t), *turn = d + (t->p->C - 2) * TILE;
    REAL *grad = ON(pose_rows)(t);
    if (t->p->form == NETWORK_WEIGHS_POSES) memcpy(grad, d, 2 * TILE * sizeof *d);
#pragma omp simd
    for (int i = 0; i < t->nv * LANES; i++) grad[2 * TILE + i] += turn[i] * direction[TILE + i] - turn[TILE + i] * direction[i];
    ON(store)(3, t->n, grad, (REAL *)t->p->grad_x + t->row * 3);
}

/* The bound of weigh_poses on the extra inputs, and what remains of their gradient, d. */
static void ON(raise_extra)(const ON(Tile) * t, REAL *a) {
    const REAL least = (REAL)t->p->least_extra;
    for (int e = 0; e < t->p->E; e++, a += TILE)
        for (int i = 0; i < t->nv * LANES; i++) a[i] = FN(raised)(a[i], least);
}
static void ON(cut_extra_gradient)(const ON(Tile) * t, const REAL *a, REAL *d) {
    const REAL least = (REAL)t->p->least_extra;
    for (int e = 0; e < t->p->E; e++, a += TILE, d += TILE)
        for (int i = 0; i < t->nv * LANES; i++) d[i] = FN(raised_gradient)(d[i], a[i], least);
}
