/* The passes over chunks and tiles; included for each type and target, see small_network.c. */
#include "small_network_tile.h"

/* The particles [row, row + n) of all B N, in one chunk, hence of one set. */
typedef struct {
    const SmallNetwork *p;
    const REAL *weights, *transposed; /* of the set */
    REAL *rows, *delta[2], *share;    /* of the tile */
    VEC *g;                           /* sums of the chunk: a vector for each parameter */
    int64_t chunk, row;
    int n, nv;
} ON(Tile);

static ON(Tile) ON(new_tile)(const SmallNetwork *p, int64_t slot) {
    REAL *rows = (REAL *)p->scratch + p->at_tiles + slot * p->tile_size, *after = rows + (int64_t)p->rows * TILE;
    int64_t widest = (int64_t)p->widest * TILE;
    return (ON(Tile)){.p = p,
                      .rows = rows,
                      .delta = {after, after + widest},
                      .share = after + 2 * widest,
                      .g = (VEC *)(after + 3 * widest + TILE)};
}

static int64_t ON(begin_chunk)(ON(Tile) * t, int64_t chunk) {
    const SmallNetwork *p = t->p;
    int64_t set = chunk / p->chunks, first = chunk % p->chunks * p->chunk;
    t->chunk = chunk;
    t->row = set * p->per_set + first;
    t->weights = (const REAL *)p->weights + set * p->P;
    t->transposed = (const REAL *)p->scratch + set * p->P;
    return set * p->per_set + (first + p->chunk < p->per_set ? first + p->chunk : p->per_set);
}

static bool ON(begin_tile)(ON(Tile) * t, int64_t stop) {
    t->n = stop - t->row < TILE ? (int)(stop - t->row) : TILE;
    t->nv = (t->n + 4 * LANES - 1) / (4 * LANES) * 4;
    return t->n > 0;
}

#include "small_network_poses.h"

/* Transposes the matrices. */
static void ON(prepare)(int64_t begin, int64_t end, void *parameters) {
    const SmallNetwork *p = parameters;
    for (int64_t r = begin; r < end; r++) {
        const REAL *w = (const REAL *)p->weights + r * p->P;
        REAL *to = (REAL *)p->scratch + r * p->P;
        for (int l = 0; l < p->n_layers; l++) {
            const NetworkLayer *a = &p->layer[l];
            for (int k = 0; k < a->columns; k++)
                for (int m = 0; m < a->out; m++) to[a->weights + k * a->out + m] = w[a->weights + m * a->columns + k];
        }
    }
}

/* Each row's share of the conditioned layer, bias + W condition: no work per particle. */
static void ON(share)(int64_t begin, int64_t end, void *parameters) {
    const SmallNetwork *p = parameters;
    if (p->conditioned < 0) return;
    const NetworkLayer *a = &p->layer[p->conditioned];
    for (int64_t b = begin; b < end; b++) {
        const int64_t set = b / (p->B / p->R) * p->P;
        const REAL *condition = (const REAL *)p->condition + b * p->K, *bias = (const REAL *)p->weights + set + a->bias;
        const REAL *matrix = (const REAL *)p->scratch + set + a->weights + a->joined * a->out;
        REAL *restrict share = (REAL *)p->scratch + p->at_share + b * a->out;
        for (int m = 0; m < a->out; m++) share[m] = bias[m];
        for (int k = 0; k < p->K; k++)
            for (int m = 0; m < a->out; m++) share[m] += matrix[k * a->out + m] * condition[k];
    }
}

/* share[m][lane] of the batch row that the lane belongs to. Whole vectors are written: what a row spoils behind its last lane
 * the next row, or the next m, writes again; idle lanes get the last row's. */
static void ON(spread)(ON(Tile) * t, int M) {
    const SmallNetwork *p = t->p;
    const int64_t first = t->row / p->N, last = (t->row + t->n - 1) / p->N;
    const REAL *by_row = (const REAL *)p->scratch + p->at_share;
    for (int m = 0; m < M; m++)
        for (int64_t b = first; b <= last; b++) {
            VEC s = by_row[b * M + m] - (VEC){0};
            int begin = b == first ? 0 : (int)(b * p->N - t->row);
            int stop = b == last ? t->nv * LANES : (int)((b + 1) * p->N - t->row);
            for (int i = begin; i < stop; i += LANES) memcpy(t->share + m * TILE + i, &s, sizeof s);
        }
}

/* Adds the deltas of each batch row's particles. */
static void ON(gather)(const ON(Tile) * t, int M, const REAL *d) {
    const SmallNetwork *p = t->p;
    const int64_t first = t->row / p->N, last = (t->row + t->n - 1) / p->N;
    REAL *by_row = (REAL *)p->scratch + p->at_grad_share;
    for (int64_t b = first; b <= last; b++) {
        int begin = b == first ? 0 : (int)(b * p->N - t->row), stop = b == last ? t->n : (int)((b + 1) * p->N - t->row);
        for (int m = 0; m < M; m++) {
            REAL sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int i = begin; i < stop; i++) sum += d[m * TILE + i];
            by_row[(b + t->chunk) * M + m] += sum;
        }
    }
}

static void ON(forward_tile)(ON(Tile) * t) {
    const SmallNetwork *p = t->p;
    if (p->form == NETWORK_ALONE) ON(load)(p->C, t->n, t->nv, 1, (const REAL *)p->x + t->row * p->C, t->rows);
    else ON(load_poses)(t);
    for (int l = 0; l < p->n_layers; l++) {
        const NetworkLayer *a = &p->layer[l];
        REAL *in = t->rows + a->row * TILE, *out = in + a->joined * TILE, *z = t->rows + a->z_row * TILE;
        if (a->enters_extra) ON(load)(p->E, t->n, t->nv, 1, (const REAL *)p->extra + t->row * p->E, in + a->in * TILE);
        if (a->enters_extra && p->form == NETWORK_WEIGHS_POSES) ON(raise_extra)(t, in + a->in * TILE);
        if (a->enters_condition) ON(spread)(t, a->out);
        ON(product)(t->nv, &(ON(Product)){.M = a->out,
                                          .K = a->joined,
                                          .ld = a->out,
                                          .w = t->transposed + a->weights,
                                          .a = in,
                                          .bias = t->weights + a->bias,
                                          .share = a->enters_condition ? t->share : NULL,
                                          .rectify = a->activation == NETWORK_RELU,
                                          .z = z});
        if (a->activation > NETWORK_RELU)
            ON(activate)(a->activation, t->nv, a->out, z, out, a->activation == NETWORK_PRELU ? t->weights[a->slope] : 0);
    }
}

static void ON(forward)(int64_t begin, int64_t end, void *parameters) {
    const SmallNetwork *p = parameters;
    ON(Tile) t = ON(new_tile)(p, begin);
    const int out = p->layer[p->n_layers - 1].out;
    for (int64_t chunk = begin; chunk < end; chunk++)
        for (int64_t stop = ON(begin_chunk)(&t, chunk); ON(begin_tile)(&t, stop); t.row += t.n) {
            ON(forward_tile)(&t);
            if (p->form == NETWORK_MOVES_POSES) ON(store_moved)(&t);
            else if (p->form == NETWORK_WEIGHS_POSES) ON(store_logs)(&t);
            else ON(store)(out, t.n, ON(output_rows)(&t), (REAL *)p->y + t.row * out);
        }
}

/* From the last layer to the first: d is the gradient of a layer's output, then of its values before the activation. */
static void ON(backward_tile)(ON(Tile) * t) {
    const SmallNetwork *p = t->p;
    const int out = p->layer[p->n_layers - 1].out;
    REAL *d = t->delta[0], *next = t->delta[1];
    if (p->form == NETWORK_MOVES_POSES) ON(load_moved_gradient)(t, d);
    else if (p->form == NETWORK_WEIGHS_POSES) ON(load_log_gradient)(t, d);
    else ON(load)(out, t->n, t->nv, 0, (const REAL *)p->grad_y + t->row * out, d);
    bool gated = false; /* the product has applied ReLU's derivative already */
    for (int l = p->n_layers - 1; l >= 0; l--) {
        const NetworkLayer *a = &p->layer[l];
        const REAL *in = t->rows + a->row * TILE, *w = t->weights + a->weights;
        if (a->activation != NETWORK_NONE && !gated)
            ON(deactivate)(a->activation, t->nv, a->out, t->rows + a->z_row * TILE, in + a->joined * TILE, d,
                           a->activation == NETWORK_PRELU ? t->weights[a->slope] : 0, t->g + a->slope);
        ON(outer)(t->nv, a->out, a->joined, d, in, t->g + a->weights, a->columns, t->g + a->bias);
        if (a->enters_condition) ON(gather)(t, a->out, d);
        if (a->enters_extra && p->grad_extra) {
            ON(product)(t->nv, &(ON(Product)){.M = a->extra, .K = a->out, .ld = a->columns, .w = w + a->in, .a = d, .z = next});
            if (p->form == NETWORK_WEIGHS_POSES) ON(cut_extra_gradient)(t, in + a->in * TILE, next);
            ON(store)(p->E, t->n, next, (REAL *)p->grad_extra + t->row * p->E);
        }
        if (l == 0 && !p->grad_x) break;
        gated = l > 0 && p->layer[l - 1].activation == NETWORK_RELU;
        ON(product)(
            t->nv,
            &(ON(Product)){.M = a->in, .K = a->out, .ld = a->columns, .w = w, .a = d, .gate = gated ? in : NULL, .z = next});
        REAL *swap = d;
        d = next;
        next = swap;
    }
    if (p->grad_x && p->form == NETWORK_ALONE) ON(store)(p->C, t->n, d, (REAL *)p->grad_x + t->row * p->C);
    else if (p->grad_x) ON(store_pose_gradient)(t, d);
}

static void ON(backward)(int64_t begin, int64_t end, void *parameters) {
    const SmallNetwork *p = parameters;
    ON(Tile) t = ON(new_tile)(p, begin);
    REAL *by_row = (REAL *)p->scratch + p->at_grad_share, *grads = (REAL *)p->scratch + p->at_grad_weights;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        int64_t stop = ON(begin_chunk)(&t, chunk);
        memset(t.g, 0, p->P * sizeof *t.g);
        if (p->conditioned >= 0) {
            int64_t M = p->layer[p->conditioned].out, first = t.row / p->N + chunk, last = (stop - 1) / p->N + chunk;
            memset(by_row + first * M, 0, (last - first + 1) * M * sizeof *by_row);
        }
        for (; ON(begin_tile)(&t, stop); t.row += t.n) {
            ON(forward_tile)(&t);
            ON(backward_tile)(&t);
        }
        for (int64_t i = 0; i < p->P; i++) grads[chunk * p->P + i] = ON(fold)(&t.g[i]);
    }
}

/* Gradients of the rows' conditions and of the matrix that they meet, from the summed deltas. */
static void ON(finish_condition)(const SmallNetwork *p, int64_t r, REAL *restrict grad_weights) {
    const NetworkLayer *a = &p->layer[p->conditioned];
    const REAL *by_row = (const REAL *)p->scratch + p->at_grad_share, *weights = (const REAL *)p->weights + r * p->P;
    for (int64_t b = r * (p->B / p->R); b < (r + 1) * (p->B / p->R); b++) {
        const REAL *condition = (const REAL *)p->condition + b * p->K;
        REAL *restrict grad = (REAL *)p->grad_condition + b * p->K;
        int64_t begin = b * p->N - r * p->per_set; /* the row's particles within the set; its chunks are first to last */
        int64_t first = begin / p->chunk, last = p->N ? (begin + p->N - 1) / p->chunk : -1;
        for (int k = 0; k < p->K; k++) grad[k] = 0;
        for (int m = 0; m < a->out; m++) {
            int64_t at = a->weights + m * a->columns + a->joined;
            REAL d = 0;
            for (int64_t c = first; c <= last; c++) d += by_row[(b + r * p->chunks + c) * a->out + m];
            for (int k = 0; k < p->K; k++) {
                grad[k] += d * weights[at + k];
                grad_weights[at + k] += d * condition[k];
            }
        }
    }
}

/* Sums the chunks in order. */
static void ON(finish)(int64_t begin, int64_t end, void *parameters) {
    const SmallNetwork *p = parameters;
    const REAL *grads = (const REAL *)p->scratch + p->at_grad_weights;
    for (int64_t r = begin; r < end; r++) {
        REAL *restrict sum = (REAL *)p->grad_weights + r * p->P;
        memset(sum, 0, p->P * sizeof *sum);
        for (int64_t c = r * p->chunks; c < (r + 1) * p->chunks; c++)
            for (int64_t i = 0; i < p->P; i++) sum[i] += grads[c * p->P + i];
        if (p->conditioned >= 0) ON(finish_condition)(p, r, sum);
    }
}
