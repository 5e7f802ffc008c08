// Quantization in blocks, and back: reference.py, to the bit. What is quantized is read twice, for its
// blocks' largest magnitudes and for itself, the second time from the cache.
#include "../native/native.h"

#define ENOUGH 16384  // elements of one piece of work
#define STRIPE 512    // columns whose blocks are worked on at one time

typedef struct {
  float limit, smallest, steps;  // its largest number, smallest normal one, and what a power of two is
                                 // multiplied by, so that float32 has its steps there
  bool power_of_two;             // scales are
  int mantissa, nan;             // bits of the first; code of the second
} Grid;

typedef struct {
  const void *x;
  void *y;
  float *scales;                   // [batch, bands, blocks]
  bool narrow, coded;              // x is bfloat16; y is in 8 bits
  long batch, rows, columns;       // of x and y
  long tall, wide, bands, blocks;  // a block, and how many there are in a matrix
  long stripe, stripes, together;  // columns of a piece of work, pieces side by side, bands of one
  Grid grid;
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

INLINE ints either(ints mask, ints x, ints y) { return (mask & x) | (~mask & y); }
INLINE ints larger(ints a, ints b) { return either(a > b, a, b); }

INLINE float scale_of(float amax, const Grid *g) {
  if (amax == 0) return 1;
  float scale = amax * (float)(1.0 / g->limit);
  if (scale < 0x1p-126f) scale = 0x1p-126f;
  if (g->power_of_two && scale < INFINITY)
    scale = float_of((bits_of(scale) + 0x007fffff) & 0x7f800000);
  return scale;
}

INLINE vec on_grid(vec x, const Grid *g) {
  ints bits = (ints)x, binade = larger(bits & 0x7f800000, (ints)splat(g->smallest));
  vec shift = (vec)binade * g->steps;
  return (vec)((ints)((x + shift) - shift) | (bits & INT32_MIN));
}

// The code of a number whose magnitude is at most the largest, ties to even.
INLINE bytes code_of(vec x, const Grid *g) {
  ints bits = (ints)x, size = bits & INT32_MAX;
  int drop = 23 - g->mantissa, smallest = bits_of(g->smallest);
  ints normal = ((size + ((1 << (drop - 1)) - 1) + ((size >> drop) & 1)) >> drop) -
                (((smallest >> 23) - 1) << g->mantissa);
  ints small = (ints)((vec)size + g->smallest * (float)(1 << drop));  // whose last bit is the step there
  ints code = either(size < smallest, small, normal);
  code = either(size > 0x7f800000, g->nan - (ints){0}, code);
  return __builtin_convertvector((code & 0x7f) | ((bits >> 24) & 0x80), bytes);
}

INLINE vec read(const Blocks *b, bool narrow, long at, long left) {
  const uint16_t *in_16 = (const uint16_t *)b->x + at;
  const float *in_32 = (const float *)b->x + at;
  if (left >= LANES) return narrow ? widen_bf16(in_16) : load(in_32);
  uint16_t few_in_16[LANES] = {0};
  float few_in_32[LANES] = {0};
  if (narrow) memcpy(few_in_16, in_16, left * sizeof *in_16);
  else memcpy(few_in_32, in_32, left * sizeof *in_32);
  return narrow ? widen_bf16(few_in_16) : load(few_in_32);
}

INLINE void write(float *y, vec x, long left) {
  if (left >= LANES) store(y, x);
  else memcpy(y, &x, left * sizeof *y);
}

// Blocks side by side: rows of `columns` numbers, the first at `at`.
INLINE void round_blocks(const Blocks *b, bool narrow, bool coded, long at, long rows, long columns,
                         float *scales) {
  const Grid *g = &b->grid;
  long padded = (columns + LANES - 1) / LANES * LANES;
  float *inverse = scratch(3 * padded * sizeof *inverse), *scale = inverse + padded;
  int32_t *largest = (int32_t *)(scale + padded);
  memset(largest, 0, padded * sizeof *largest);
  for (long r = 0; r < rows; r++)
    for (long i = 0; i < columns; i += LANES) {
      // in the order of float32, NaN above all
      ints size = (ints)read(b, narrow, at + r * b->columns + i, columns - i) & INT32_MAX;
      *(ints *)(largest + i) = larger(*(ints *)(largest + i), size);
    }
  for (long first = 0; first < columns; first += b->wide) {
    long end = least(first + b->wide, columns);
    int32_t amax = 0;
    for (long i = first; i < end; i++)
      if (largest[i] > amax) amax = largest[i];
    float one = scale_of(float_of(amax), g);
    scales[first / b->wide] = one;
    for (long i = first; i < end; i++) inverse[i] = 1 / one, scale[i] = one;
  }
  vec limit = splat(g->limit);
  for (long r = 0; r < rows; r++)
    for (long i = 0; i < columns; i += LANES) {
      long here = at + r * b->columns + i, left = columns - i;
      vec scaled = read(b, narrow, here, left) * *(vec *)(inverse + i);
      scaled = where(scaled > limit, limit, where(scaled < -limit, -limit, scaled));
      if (!coded) {
        write((float *)b->y + here, on_grid(scaled, g) * *(vec *)(scale + i), left);
        continue;
      }
      bytes codes = code_of(scaled, g);
      memcpy((uint8_t *)b->y + here, &codes, least(left, LANES));
    }
}

// Codes side by side, times their scales.
INLINE void widen_blocks(const Blocks *b, bool wide_exponent, long at, long rows, long columns,
                         const float *scales) {
  float *scale = scratch((columns + LANES) * sizeof *scale);
  for (long first = 0; first < columns; first += b->wide, scales++)
    for (long i = first; i < least(first + b->wide, columns); i++) scale[i] = *scales;
  for (long r = 0; r < rows; r++)
    for (long i = 0; i < columns; i += LANES) {
      long here = at + r * b->columns + i, left = columns - i;
      uint8_t few[LANES] = {0};
      const uint8_t *codes = (const uint8_t *)b->x + here;
      if (left < LANES) codes = memcpy(few, codes, left);
      vec x = wide_exponent ? widen_e5m2(codes) : widen_e4m3(codes);
      write((float *)b->y + here, x * *(vec *)(scale + i), left);
    }
}

// body for the blocks of a piece of work
#define EACH_BAND(b, piece, ...)                                                                     \
  long first = piece % b->stripes * b->stripe, columns = least(b->stripe, b->columns - first);       \
  long begin = piece / b->stripes * b->together;                                                     \
  long end = least(begin + b->together, b->batch * b->bands);                                        \
  for (long band = begin; band < end; band++) {                                                      \
    long top = band % b->bands * b->tall, rows = least(b->tall, b->rows - top);                      \
    long at = (band / b->bands * b->rows + top) * b->columns + first;                                \
    float *scales = b->scales + band * b->blocks + first / b->wide;                                  \
    __VA_ARGS__;                                                                                     \
  }

static void round_piece(const void *work, long piece) {
  const Blocks *b = work;
#define ROUND(narrow, coded) EACH_BAND(b, piece, round_blocks(b, narrow, coded, at, rows, columns, scales))
  if (b->narrow && b->coded) { ROUND(true, true) }
  else if (b->narrow) { ROUND(true, false) }
  else if (b->coded) { ROUND(false, true) }
  else { ROUND(false, false) }
#undef ROUND
}

static void widen_piece(const void *work, long piece) {
  const Blocks *b = work;
  if (b->grid.mantissa == 2) { EACH_BAND(b, piece, widen_blocks(b, true, at, rows, columns, scales)) }
  else { EACH_BAND(b, piece, widen_blocks(b, false, at, rows, columns, scales)) }
}

static void in_blocks(XLA_FFI_CallFrame *call, void (*body)(const void *, long), Blocks b,
                      const XLA_FFI_Buffer *shape, const float *format) {
  b.batch = 1;
  for (long i = 0; i < shape->rank - 2; i++) b.batch *= shape->dims[i];
  b.rows = shape->dims[shape->rank - 2], b.columns = shape->dims[shape->rank - 1];
  b.tall = format[0], b.wide = format[1];
  b.grid = (Grid){format[2], format[3], format[4], format[5] != 0, format[6], format[7]};
  b.bands = (b.rows + b.tall - 1) / b.tall, b.blocks = (b.columns + b.wide - 1) / b.wide;
  b.stripe = most(1, STRIPE / b.wide) * b.wide, b.stripes = (b.columns + b.stripe - 1) / b.stripe;
  b.together = most(1, ENOUGH / (b.tall * least(b.stripe, b.columns)));
  long pieces = (b.batch * b.bands + b.together - 1) / b.together * b.stripes;
  in_parallel(call, pieces, body, &b);
}

// (x [batch.., m, n], format [8]: rows and columns of a block, and its Grid)
// -> (y [batch.., m, n], in 8 bits or float32, scales [batch.., bands, blocks])
XLA_FFI_Error *fp8rl_quantize(XLA_FFI_CallFrame *call) {
  if (asks_for_version(call)) return NULL;
  XLA_FFI_Buffer *x = argument(call, 0), *y = result(call, 0);
  Blocks b = {x->data, y->data, result(call, 1)->data};
  b.narrow = x->dtype == XLA_FFI_DataType_BF16, b.coded = y->dtype != XLA_FFI_DataType_F32;
  in_blocks(call, round_piece, b, x, argument(call, 1)->data);
  return NULL;
}

// (codes [batch.., m, n], scales [batch.., bands, blocks], format [8]) -> y [batch.., m, n]
XLA_FFI_Error *fp8rl_dequantize(XLA_FFI_CallFrame *call) {
  if (asks_for_version(call)) return NULL;
  XLA_FFI_Buffer *x = argument(call, 0);
  Blocks b = {x->data, result(call, 0)->data, argument(call, 1)->data};
  in_blocks(call, widen_piece, b, x, argument(call, 2)->data);
  return NULL;
}
