/* What a Mixture Density Particle Filter over poses does between the operators of its steps.
 *
 * T steps on B rows of N particles (x, y, heading): filter_poses runs mixture_resample, move_poses, weigh_poses and
 * normalize_log_weights, and backward their derivatives with that of iwsg_log_weights, in the order that csrc/filter_steps.c
 * has, on a CPU for a block of rows after the other (csrc/filter_blocks.h). Here is what remains:
 *
 *   begin   predicted (T, B, N) = -log N, the weights of fresh draws; ancestors (B, N) of the first step: 0 to N - 1
 *   add     sum = a + b, of those that are there (0 without any): gradients that reach a step by several ways
 *
 * Items are numbers of predicted, and of sum. Cost: a pass over memory.
 */
#ifndef MDPS_FILTER_POSES_H
#define MDPS_FILTER_POSES_H
#include <stdint.h>

#include "clones.h"
#include "cuda_launch.h"

typedef struct {
    int64_t B, N;
    double weight; /* CUDA: -log N, by the host */
    void *predicted;
    int64_t *ancestors;
} FilterPosesBegin;

typedef struct {
    void *sum;
    const void *a, *b; /* may be NULL, or the sum itself */
} FilterPosesAdd;

void filter_poses_begin_f32(int64_t begin, int64_t end, void *parameters);
void filter_poses_begin_f64(int64_t begin, int64_t end, void *parameters);
void filter_poses_add_f32(int64_t begin, int64_t end, void *parameters);
void filter_poses_add_f64(int64_t begin, int64_t end, void *parameters);
LAUNCHER int filter_poses_begin_cuda(const void *parameters, int64_t n, int is_double, void *stream);
LAUNCHER int filter_poses_add_cuda(const void *parameters, int64_t n, int is_double, void *stream);
#endif
