// Blocks of a row, quantized and dequantized in one read: `round_blocks` of reference.py, to the bit.
#include "../native/native.h"

#define ENOUGH 16384  // elements of one piece of work

typedef struct {
  const float *x;
  float *y;
  long rows, columns, size, pieces;
  float limit, smallest, steps;  // of the format: its largest number, smallest normal one, and what a
                                 // power of two is multiplied by, so that float32 has its steps there
  bool power_of_two;
} Blocks;

INLINE int32_t bits_of(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

INLINE float float_of(int32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

INLINE ints larger(ints a, ints b) { return (a > b & a) | (~(a > b) & b); }

INLINE float scale_of(float amax, const Blocks *b) {
  if (amax == 0) return 1;
  float scale = amax * (float)(1.0 / b->limit);
  if (scale < 0x1p-126f) scale = 0x1p-126f;
  if (b->power_of_two && scale < INFINITY)
    scale = float_of((bits_of(scale) + 0x007fffff) & 0x7f800000);
  return scale;
}

INLINE vec on_grid(vec x, const Blocks *b) {
  ints bits = (ints)x, binade = larger(bits & 0x7f800000, (ints)splat(b->smallest));
  vec shift = (vec)binade * b->steps;
  return (vec)((ints)((x + shift) - shift) | (bits & INT32_MIN));
}

static void round_block(const float *x, long size, const Blocks *b, float *y) {
  long whole = size / LANES * LANES;
  float last[LANES] = {0};
  memcpy(last, x + whole, (size - whole) * sizeof *x);
  ints largest = {0};
  for (long i = 0; i <= whole; i += LANES) {
    ints bits = (ints)load(i < whole ? x + i : last) & INT32_MAX;  // in the order of float32, NaN above all
    largest = larger(largest, bits);
  }
  int32_t amax = 0;
  for (int i = 0; i < LANES; i++) amax = most(amax, largest[i]);
  float scale = scale_of(float_of(amax), b), inverse = 1 / scale;
  vec limit = splat(b->limit);
  for (long i = 0; i <= whole; i += LANES) {
    vec scaled = load(i < whole ? x + i : last) * inverse;
    scaled = where(scaled > limit, limit, where(scaled < -limit, -limit, scaled));
    vec rounded = on_grid(scaled, b) * scale;
    if (i < whole) store(y + i, rounded);
    else memcpy(y + whole, &rounded, (size - whole) * sizeof *y);
  }
}

static void round_rows(const void *work, long piece) {
  const Blocks *b = work;
  long last = b->rows * (piece + 1) / b->pieces;
  for (long row = b->rows * piece / b->pieces; row < last; row++)
    for (long at = 0; at < b->columns; at += b->size) {
      long first = row * b->columns + at;
      round_block(b->x + first, least(b->size, b->columns - at), b, b->y + first);
    }
}

// (x [m, n], format [5]: size of a block, limit, smallest, steps, power of two) -> y [m, n]
XLA_FFI_Error *fp8rl_round_blocks(XLA_FFI_CallFrame *call) {
  if (asks_for_version(call)) return NULL;
  XLA_FFI_Buffer *x = argument(call, 0), *y = result(call, 0);
  const float *format = argument(call, 1)->data;
  Blocks b = {x->data, y->data, x->dims[0], x->dims[1], (long)format[0], 0,
              format[1], format[2], format[3], format[4] != 0};
  b.pieces = most(1, least(b.rows, b.rows * b.columns / ENOUGH));
  in_parallel(call, b.pieces, round_rows, &b);
  return NULL;
}
