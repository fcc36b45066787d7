/* Normal deviates tile by tile; a tile is drawn whole and what the row has is kept. Contract: philox_normal.h. */
#ifndef REAL
#include "philox_normal.h"
#define MDPS_FILE "philox_normal.c"
#include "for_each_real.h"
#else
#include "real_math.h"

#include "draw.h"

CLONES void FN(philox_normal)(int64_t begin, int64_t end, void *parameters) {
    const PhiloxDraw *p = parameters;
    const int64_t n = p->n, tiles = (n + PHILOX_TILE - 1) / PHILOX_TILE;
    REAL tile[PHILOX_TILE];
    for (int64_t item = begin; item < end; item++) {
        int64_t b = item / tiles, first = item % tiles * PHILOX_TILE, left = n - first;
        int64_t count = left < PHILOX_TILE ? left : PHILOX_TILE;
        FN(draw_normal)(source_of_row(p->seed, b), first, (count + 3) / 4 * 4, tile);
        memcpy((REAL *)p->out + b * n + first, tile, (size_t)count * sizeof(REAL));
    }
}
#endif
