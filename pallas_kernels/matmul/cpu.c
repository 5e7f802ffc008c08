// y = x w^T in float32: each element is added in the order of k, by fused multiply-add, whatever the
// number of rows, the layout of w and the width of the machine's vectors. So a row has the same bits
// in every batch and on every machine.
//
// A panel is COLUMNS rows of w as [k, COLUMNS]. Weights of a decode loop lie in panels already
// (`pack`); others are brought into that form DEPTH of k at a time.
#include "../native/native.h"

#if LANES == 16
#define VECTORS 2
#define ROWS 8
#else
#define VECTORS 3
#define ROWS 4
#endif
#define COLUMNS (LANES * VECTORS)
#define DEPTH 128
#define MANY_ROWS 512  // of one piece of work

int fp8rl_columns(void) { return COLUMNS; }

// Add x [rows, depth] times a panel [depth, COLUMNS] to sums [rows, COLUMNS].
INLINE void add_rows(const int rows, long depth, const float *x, long stride, const float *panel,
                     float *sums, bool first, const char *ahead) {
  vec acc[ROWS][VECTORS];
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < VECTORS; j++)
      acc[r][j] = first ? splat(0) : *(vec *)(sums + r * COLUMNS + j * LANES);
  for (long k = 0; k < depth; k++) {
    if (k % 4 == 0) __builtin_prefetch(ahead + k * 16);
    vec w[VECTORS];
    for (int j = 0; j < VECTORS; j++) {
      w[j] = *(vec *)(panel + k * COLUMNS + j * LANES);
#if defined(__x86_64__)
      __asm__("" : "+x"(w[j]));  // loaded once, not once a row
#endif
    }
    for (int r = 0; r < rows; r++) {
      vec a = splat(x[r * stride + k]);
      for (int j = 0; j < VECTORS; j++) acc[r][j] += a * w[j];
    }
  }
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < VECTORS; j++) *(vec *)(sums + r * COLUMNS + j * LANES) = acc[r][j];
}

static void add(long rows, long depth, const float *x, long stride, const float *panel,
                float *sums, bool first, const char *ahead) {
#define CASE(n) case n: add_rows(n, depth, x, stride, panel, sums, first, ahead); break;
  for (; rows >= ROWS; rows -= ROWS, x += ROWS * stride, sums += ROWS * COLUMNS) {
    add_rows(ROWS, depth, x, stride, panel, sums, first, ahead);
    ahead += depth * 16;
  }
  switch (rows) {
#if ROWS == 8
    CASE(7) CASE(6) CASE(5) CASE(4)
#endif
    CASE(3) CASE(2) CASE(1)
  }
#undef CASE
}

typedef struct {
  const float *x, *w;  // [m, k]; [n, k], or panels
  float *y;            // [m, n]
  long m, n, k, panels;
  bool packed;
} Product;

#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
#define HAS_SHUFFLE 1
#else
#define HAS_SHUFFLE 0  // gcc before 12
#define __builtin_shufflevector(a, b, ...) (a)
#endif

typedef float eight __attribute__((vector_size(32)));
typedef float loose_eight __attribute__((vector_size(32), aligned(4)));

// Transpose 8 x 8 of w into a panel, in three rounds that each swap halves of what is left.
INLINE void transpose(const float *w, long stride, float *panel) {
  eight row[8], pair[8], quad[8];
  for (int i = 0; i < 8; i++) row[i] = *(const loose_eight *)(w + i * stride);
  for (int i = 0; i < 8; i += 2) {
    pair[i] = __builtin_shufflevector(row[i], row[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    pair[i + 1] = __builtin_shufflevector(row[i], row[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = i; j < i + 2; j++) {
      quad[j] = __builtin_shufflevector(pair[j], pair[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      quad[j + 2] = __builtin_shufflevector(pair[j], pair[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; i++) {
    eight low = __builtin_shufflevector(quad[i], quad[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    eight high = __builtin_shufflevector(quad[i], quad[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    *(loose_eight *)(panel + i * COLUMNS) = low;
    *(loose_eight *)(panel + (i + 4) * COLUMNS) = high;
  }
}

// Bring columns of w [columns, stride] into a panel [depth, COLUMNS], 0 behind the last.
static void fill_panel(const float *w, long columns, long stride, long depth, float *panel) {
  long whole = HAS_SHUFFLE ? columns / 8 * 8 : 0, deep = depth / 8 * 8;
  if (columns < COLUMNS) memset(panel, 0, depth * COLUMNS * sizeof *panel);
  for (long k = 0; k < deep; k += 8)
    for (long c = 0; c < whole; c += 8)
      transpose(w + c * stride + k, stride, panel + k * COLUMNS + c);
  for (long c = 0; c < columns; c++)
    for (long k = c < whole ? deep : 0; k < depth; k++)
      panel[k * COLUMNS + c] = w[c * stride + k];
}

static void multiply(const void *work, long i) {
  const Product *p = work;
  long panel = i % p->panels, n = panel * COLUMNS, columns = least(p->n - n, COLUMNS);
  long first = i / p->panels * MANY_ROWS, rows = least(p->m - first, MANY_ROWS);
  float *sums = scratch((rows + DEPTH) * COLUMNS * sizeof *sums), *part = sums + rows * COLUMNS;
  for (long k = 0; k < p->k; k += DEPTH) {
    long depth = least(p->k - k, DEPTH);
    const float *now = part, *next = part;
    if (p->packed)
      now = p->w + (panel * p->k + k) * COLUMNS, next = now + depth * COLUMNS;
    else
      fill_panel(p->w + n * p->k + k, columns, p->k, depth, part);
    add(rows, depth, p->x + first * p->k + k, p->k, now, sums, !k, (const char *)next);
  }
  for (long r = 0; r < rows; r++)
    memcpy(p->y + (first + r) * p->n + n, sums + r * COLUMNS, columns * sizeof *sums);
}

// (x [m, k], w [n, k] or panels) -> y [m, n]
XLA_FFI_Error *fp8rl_dot(XLA_FFI_CallFrame *call) {
  if (asks_for_version(call)) return NULL;
  XLA_FFI_Buffer *x = argument(call, 0), *w = argument(call, 1), *y = result(call, 0);
  Product p = {x->data, w->data, y->data, x->dims[0], y->dims[1], x->dims[1], 0, w->rank == 3};
  p.panels = (p.n + COLUMNS - 1) / COLUMNS;
  in_parallel(call, p.panels * ((p.m + MANY_ROWS - 1) / MANY_ROWS), multiply, &p);
  return NULL;
}

static void pack_panel(const void *work, long panel) {
  const Product *p = work;
  long n = panel * COLUMNS;
  fill_panel(p->w + n * p->k, least(p->n - n, COLUMNS), p->k, p->k, p->y + n * p->k);
}

// w [n, k] -> panels [ceil(n / COLUMNS), k, COLUMNS]
XLA_FFI_Error *fp8rl_pack(XLA_FFI_CallFrame *call) {
  if (asks_for_version(call)) return NULL;
  XLA_FFI_Buffer *w = argument(call, 0), *panels = result(call, 0);
  Product p = {NULL, w->data, panels->data, 0, w->dims[0], w->dims[1], panels->dims[0], false};
  in_parallel(call, p.panels, pack_panel, &p);
  return NULL;
}
