/* Poses (x, y, heading) before and behind the layers, on a tile on the GPU; included for each type by small_network_passes.cuh.
 * Contracts: move_poses.h, weigh_poses.h.
 *
 * The first NETWORK_TILE threads have a particle each, and no barrier between them. As on the CPU the direction is the last two
 * inputs of the first layer, and of the rows from pose_row on two keep the position that moves, and the third, backward, what
 * reaches the heading past the layers.
 */
DEVICE bool FN(has_particle)() { return threadIdx.x < NETWORK_TILE; }
DEVICE REAL *FN(own_pose)(const SmallNetwork &p, const FN(Tile) &t) { return t.rows + p.pose_row * STRIDE + threadIdx.x; }
DEVICE REAL *FN(own_direction)(const FN(Tile) &t) { return t.rows + (FORM == NETWORK_WEIGHS_POSES ? 2 * STRIDE : 0) + threadIdx.x; }

/* Idle lanes repeat the last particle. */
DEVICE void FN(load_poses)(const SmallNetwork &p, const FN(Tile) &t) {
    if (!FN(has_particle)()) return;
    const REAL *from = (const REAL *)p.x + (t.row + at_most(threadIdx.x, t.n - 1)) * 3;
    REAL *to = FORM == NETWORK_WEIGHS_POSES ? t.rows + threadIdx.x : FN(own_pose)(p, t), *direction = FN(own_direction)(t);
    const REAL x = from[0], y = from[1], heading = from[2];
    to[0] = x;
    to[STRIDE] = y;
    FN(sine_cosine)(heading, &direction[0], &direction[STRIDE]);
}

/* The direction after the move. */
DEVICE void FN(moved_direction)(const SmallNetwork &p, const FN(Tile) &t, const REAL *share, REAL *sine, REAL *cosine) {
    const REAL *scale = (const REAL *)p.scale, *direction = FN(own_direction)(t);
    *sine = FN(stepped)(direction[0], scale[2], share[2 * STRIDE]);
    *cosine = FN(stepped)(direction[STRIDE], scale[3], share[3 * STRIDE]);
}

/* `outputs`: the rows that the last layer returned. */
DEVICE void FN(store_results)(const SmallNetwork &p, const FN(Tile) &t, const REAL *outputs) {
    if (threadIdx.x >= t.n) return;
    const REAL *share = outputs + threadIdx.x, *scale = (const REAL *)p.scale, *pose = FN(own_pose)(p, t);
    const int64_t particle = t.row + threadIdx.x;
    if (FORM == NETWORK_WEIGHS_POSES) {
        ((REAL *)p.y)[particle] = FN(log_of_share)(share[0], (REAL)p.minimum);
        return;
    }
    REAL *to = (REAL *)p.y + particle * 3, sine, cosine;
    FN(moved_direction)(p, t, share, &sine, &cosine);
    to[0] = FN(stepped)(pose[0], scale[0], share[0]);
    to[1] = FN(stepped)(pose[STRIDE], scale[1], share[STRIDE]);
    to[2] = FN(heading_of)(sine, cosine);
}

/* The gradient of the shares, 0 in idle lanes, as the first delta. */
DEVICE void FN(load_gradients)(const SmallNetwork &p, const FN(Tile) &t, const REAL *outputs) {
    if (!FN(has_particle)()) return;
    const REAL *share = outputs + threadIdx.x, *scale = (const REAL *)p.scale;
    REAL *delta = t.delta + threadIdx.x;
    const bool is_idle = threadIdx.x >= t.n;
    const int64_t particle = t.row + threadIdx.x;
    if (FORM == NETWORK_WEIGHS_POSES) {
        const REAL grad = is_idle ? 0 : ((const REAL *)p.grad_y)[particle];
        delta[0] = FN(share_gradient)(grad, share[0], (REAL)p.minimum);
        return;
    }
    const REAL *from = (const REAL *)p.grad_y + particle * 3, *direction = FN(own_direction)(t);
    REAL sine, cosine, grad_sine, grad_cosine;
    FN(moved_direction)(p, t, share, &sine, &cosine);
    FN(heading_gradient)(is_idle ? 0 : from[2], sine, cosine, &grad_sine, &grad_cosine);
    delta[0] = 2 * scale[0] * (is_idle ? 0 : from[0]);
    delta[STRIDE] = 2 * scale[1] * (is_idle ? 0 : from[1]);
    delta[2 * STRIDE] = 2 * scale[2] * grad_sine;
    delta[3 * STRIDE] = 2 * scale[3] * grad_cosine;
    FN(own_pose)(p, t)[2 * STRIDE] = grad_sine * direction[STRIDE] - grad_cosine * direction[0];
}

/* From the gradient of the first layer's inputs. */
DEVICE void FN(store_pose_gradient)(const SmallNetwork &p, const FN(Tile) &t) {
    if (threadIdx.x >= t.n) return;
    const bool moves = FORM == NETWORK_MOVES_POSES;
    const int64_t at = (t.row + threadIdx.x) * 3;
    const REAL *past = (const REAL *)p.grad_y + at, *delta = t.delta + threadIdx.x, *direction = FN(own_direction)(t);
    const REAL *turn = delta + (moves ? 0 : 2 * STRIDE);
    REAL *to = (REAL *)p.grad_x + at;
    to[0] = moves ? past[0] : delta[0];
    to[1] = moves ? past[1] : delta[STRIDE];
    to[2] = (moves ? FN(own_pose)(p, t)[2 * STRIDE] : 0) + turn[0] * direction[STRIDE] - turn[STRIDE] * direction[0];
}

/* What the same thread has loaded: as FN(load). */
DEVICE void FN(raise_extra)(const SmallNetwork &p, int thread, REAL *a) {
    for (int i = (THREADS + threadIdx.x - thread % THREADS) % THREADS; i < NETWORK_TILE * p.E; i += THREADS) {
        REAL *value = &a[i % p.E * STRIDE + i / p.E];
        *value = FN(raised)(*value, (REAL)p.least_extra);
    }
}
