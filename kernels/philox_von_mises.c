/* Von Mises deviates tile by tile. Contract: philox_von_mises.h. */
#ifndef REAL
#include "philox_von_mises.h"
#define MDPS_FILE "philox_von_mises.c"
#include "for_each_real.h"
#else
#include "real_math.h"

#include "draw.h"

CLONES void FN(philox_von_mises)(int64_t begin, int64_t end, void *parameters) {
    const PhiloxVonMises *p = parameters;
    const int64_t n = p->n, tiles = (n + DRAW_TILE - 1) / DRAW_TILE;
    for (int64_t item = begin; item < end; item++) {
        int64_t b = item / tiles, first = item % tiles * DRAW_TILE, left = n - first;
        const REAL *concentration = (const REAL *)p->concentration + b * n + first;
        REAL *out = (REAL *)p->out + b * n + first;
        FN(draw_von_mises)(source_of_row(p->seed, b), first, left < DRAW_TILE ? (int)left : DRAW_TILE, concentration, out);
    }
}
#endif
