// softmax(q k^T) v of one query over a list of keys, in float32. Scores are added along the head's
// dimension in 16 sums, weights in 16 sums along the list, values in the list's order. So a query's
// bits depend on the keys that it sees and their order, and not on where they lie, in which dtype
// of those that hold the same numbers, on other rows, or on the width of the machine's vectors.
#include "../native/native.h"

#define WIDTH 16  // of sums
#define TILE 64   // keys that are widened at one time
#define PARTS (WIDTH / LANES)

typedef struct {
  const char *keys, *values;  // [count, dim]
  long count;
} Run;

typedef struct {
  XLA_FFI_DataType kind;
  long dim, size;  // of a head; bytes of an element
} Form;

INLINE long padded(long n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }

// float32 [count, dim] of keys or values: themselves, or written to `tile`
INLINE const float *widened(const Form *form, const char *from, long count, float *tile) {
  long n = count * form->dim;
  if (form->kind == XLA_FFI_DataType_F32) return (const float *)from;
  if (form->kind == XLA_FFI_DataType_BF16)
    for (long i = 0; i < n; i += LANES) store(tile + i, widen_bf16((const uint16_t *)from + i));
  else
    for (long i = 0; i < n; i += LANES) store(tile + i, widen_e4m3((const uint8_t *)from + i));
  return tile;
}

// Add 16 numbers: halves onto each other.
INLINE float add_up(const vec *sums) {
  typedef float four __attribute__((vector_size(16), aligned(4)));
  float at[WIDTH] __attribute__((aligned(64)));
  for (int i = 0; i < PARTS; i++) ((vec *)at)[i] = sums[i];
  four x = (*(four *)at + *(four *)(at + 8)) + (*(four *)(at + 4) + *(four *)(at + 12));
  return (x[0] + x[2]) + (x[1] + x[3]);
}

INLINE float score_of(const float *query, const float *key, long dim) {
  vec sums[PARTS] = {{0}};
  for (long d = 0; d < dim; d += WIDTH)
    for (int i = 0; i < PARTS; i++)
      sums[i] += load(query + d + i * LANES) * load(key + d + i * LANES);
  return add_up(sums);
}

// e^x of x <= 0, by 2^n e^r with |r| <= ln(2) / 2 and a Taylor polynomial: within 2 units in the last
// place; 0 below -87.
INLINE vec exp_of(vec x) {
  vec shifted = x * 0x1.715476p+0f + 0x1.8p23f, n = shifted - 0x1.8p23f;  // to the nearest whole
  vec r = x - n * 0x1.62e400p-1f - n * 0x1.7f7d1cp-20f;
  vec e = splat(1 / 5040.0f);
  e = e * r + 1 / 720.0f, e = e * r + 1 / 120.0f, e = e * r + 1 / 24.0f;
  e = e * r + 1 / 6.0f, e = e * r + 0.5f, e = e * r + 1.0f, e = e * r + 1.0f;
  ints bits = (ints)e + __builtin_convertvector(n, ints) * (1 << 23);
  return where(x < -87.0f, splat(0), (vec)bits);
}

// Make weights e^(score - largest) of n scores; returns their sum. Reads and writes 16 at a time.
static float weigh(float *scores, long n) {
  float top = -INFINITY;
  bool broken = false;
  for (long j = 0; j < n; j++) {
    broken |= scores[j] != scores[j];
    top = scores[j] > top ? scores[j] : top;
  }
  for (long j = n; j < padded(n); j++) scores[j] = -INFINITY;
  if (broken || top - top != 0) {  // what is not a number stays visible
    for (long j = 0; j < n; j++) scores[j] = NAN;
    return NAN;
  }
  vec sums[PARTS] = {{0}};
  for (long j = 0; j < n; j += WIDTH)
    for (int i = 0; i < PARTS; i++) {
      vec weights = exp_of(load(scores + j + i * LANES) - top);
      store(scores + j + i * LANES, weights);
      sums[i] += weights;
    }
  return add_up(sums);
}

INLINE void add_values(const int vectors, const float *weights, const float *values, long count,
                       long dim, float *out) {
  vec acc[WIDTH];
  for (int i = 0; i < vectors; i++) acc[i] = load(out + i * LANES);
  for (long j = 0; j < count; j++)
    for (int i = 0; i < vectors; i++) acc[i] += weights[j] * load(values + j * dim + i * LANES);
  for (int i = 0; i < vectors; i++) store(out + i * LANES, acc[i]);
}

typedef struct {
  const float *query, *scales;  // [rows, heads, dim]; [2, kv_heads], of scores and of values
  float *out;
  long kv_heads, group, dim;
} Heads;

// Attend to `runs` with the queries of one KV head, of row `row` of query and out. `room` has
// `room_for` floats.
static void attend(const Heads *p, const Form *form, long row, long head, const Run *runs,
                   long count, long keys, float *room) {
  long dim = p->dim, group = p->group, stride = padded(keys);
  long first = (row * p->kv_heads + head) * group * dim;
  float *queries = room, *scores = queries + group * dim, *tile = scores + group * stride;
  float *out = p->out + first, totals[group];
  for (long d = 0; d < group * dim; d++) queries[d] = p->query[first + d] * p->scales[head];
  memset(out, 0, group * dim * sizeof *out);
  if (!keys) return;
  long at = 0;
  for (const Run *run = runs; run < runs + count; run++)
    for (long j = 0, some; j < run->count; j += some, at += some) {
      some = least(run->count - j, TILE);
      const float *k = widened(form, run->keys + j * dim * form->size, some, tile);
      for (long g = 0; g < group; g++)
        for (long i = 0; i < some; i++)
          scores[g * stride + at + i] = score_of(queries + g * dim, k + i * dim, dim);
    }
  for (long g = 0; g < group; g++) totals[g] = weigh(scores + g * stride, keys);
  at = 0;
  for (const Run *run = runs; run < runs + count; run++)
    for (long j = 0, some; j < run->count; j += some, at += some) {
      some = least(run->count - j, TILE);
      const float *v = widened(form, run->values + j * dim * form->size, some, tile);
      for (long g = 0; g < group; g++) {
        const float *weights = scores + g * stride + at;
        long d = 0;
        for (; d + 4 * LANES <= dim; d += 4 * LANES)
          add_values(4, weights, v + d, some, dim, out + g * dim + d);
        for (; d < dim; d += LANES) add_values(1, weights, v + d, some, dim, out + g * dim + d);
      }
    }
  for (long g = 0; g < group; g++)
    for (long d = 0; d < dim; d++) out[g * dim + d] *= p->scales[p->kv_heads + head] / totals[g];
}

INLINE long room_for(const Heads *p, long keys) {
  return p->group * (p->dim + padded(keys)) + TILE * p->dim;
}

// Scratch of `runs` runs, and behind them of floats for `keys` keys.
INLINE Run *room_of(const Heads *p, long runs, long keys, float **floats) {
  size_t first = (runs * sizeof(Run) + 63) / 64 * 64;
  char *at = scratch(first + room_for(p, keys) * sizeof(float));
  *floats = (float *)(at + first);
  return (Run *)at;
}

static Heads heads_of(XLA_FFI_CallFrame *call, int query, int scales) {
  XLA_FFI_Buffer *q = argument(call, query), *factors = argument(call, scales);
  long kv_heads = factors->dims[1], dim = q->dims[q->rank - 1], heads = q->dims[q->rank - 2];
  return (Heads){q->data, factors->data, result(call, 0)->data, kv_heads, heads / kv_heads, dim};
}

static Form form_of(const XLA_FFI_Buffer *keys) {
  long size = keys->dtype == XLA_FFI_DataType_F32 ? 4 : keys->dtype == XLA_FFI_DataType_BF16 ? 2 : 1;
  return (Form){keys->dtype, keys->dims[3], size};
}

#define MOST_CACHES 8

typedef struct {
  const char *keys, *values;              // [cache rows, kv_heads, slots, dim]
  const int32_t *lengths, *pages, *from;  // of each row; [rows, columns]; of each sequence
  long rows, columns, slots, page, cache_rows;
} Cache;

typedef struct {
  Heads heads;
  Form form;
  Cache caches[MOST_CACHES];
  long count, sequences;
} Decode;

static void decode(const void *work, long i) {
  const Decode *p = work;
  long sequence = i / p->heads.kv_heads, head = i % p->heads.kv_heads;
  long most_keys = 0, most_runs = 0, keys = 0, count = 0;
  for (const Cache *c = p->caches; c < p->caches + p->count; c++)
    most_keys += c->columns * c->page, most_runs += c->columns;
  // no more is touched than there are keys
  float *room;
  Run *runs = room_of(&p->heads, most_runs, most_keys, &room);
  for (const Cache *c = p->caches; c < p->caches + p->count; c++) {
    long row = sequence / (p->sequences / c->rows), in_row = (c->slots + c->page - 1) / c->page;
    long end = least(c->lengths[row], c->columns * c->page), begin = most(0, c->from[sequence]);
    for (long column = begin / c->page; column * c->page < end; column++) {
      long page = c->pages[row * c->columns + column], first = column * c->page;
      if (page < 0 || page >= c->cache_rows * in_row) continue;
      long slot = page % in_row * c->page;
      long stop = least(least(end - first, c->page), c->slots - slot), start = most(0, begin - first);
      if (start >= stop) continue;
      long at = ((page / in_row * p->heads.kv_heads + head) * c->slots + slot + start) * p->form.dim;
      runs[count++] = (Run){c->keys + at * p->form.size, c->values + at * p->form.size, stop - start};
      keys += stop - start;
    }
  }
  attend(&p->heads, &p->form, sequence, head, runs, count, keys, room);
}

// (query [sequences, heads, dim], scales [2, kv_heads], page sizes [caches], and of each cache keys,
// values, lengths, pages, the first key that each sequence sees) -> out
XLA_FFI_Error *fp8rl_decode_attention(XLA_FFI_CallFrame *call) {
  if (asks_for_version(call)) return NULL;
  Decode p = {.heads = heads_of(call, 0, 1), .form = form_of(argument(call, 3))};
  p.sequences = argument(call, 0)->dims[0], p.count = argument(call, 2)->dims[0];
  const int32_t *sizes = argument(call, 2)->data;
  for (int i = 0; i < p.count; i++) {
    XLA_FFI_Buffer *part[5];
    for (int j = 0; j < 5; j++) part[j] = argument(call, 3 + 5 * i + j);
    p.caches[i] = (Cache){part[0]->data, part[1]->data, part[2]->data, part[3]->data, part[4]->data,
                          part[2]->dims[0], part[3]->dims[1], part[0]->dims[2], sizes[i],
                          part[0]->dims[0]};
  }
  in_parallel(call, p.sequences * p.heads.kv_heads, decode, &p);
  return NULL;
}

typedef struct {
  const char *keys, *values;  // [rows, kv_heads, slots, dim]
  const bool *mask;           // [rows or 1, queries of a row or 1, slots]
  long rows, slots, mask_rows, mask_queries;
} Block;

typedef struct {
  Heads heads;
  Form form;
  Block blocks[MOST_CACHES];
  long count, batch, queries;
} Masked;

static void attend_masked(const void *work, long i) {
  const Masked *p = work;
  long head = i % p->heads.kv_heads, query = i / p->heads.kv_heads;
  long b = query / p->queries, t = query % p->queries, keys = 0, count = 0, most_keys = 0;
  for (const Block *c = p->blocks; c < p->blocks + p->count; c++) most_keys += c->slots;
  float *room;
  Run *runs = room_of(&p->heads, most_keys / 2 + p->count, most_keys, &room);
  for (const Block *c = p->blocks; c < p->blocks + p->count; c++) {
    long sharing = p->batch / c->rows, row = b / sharing, in_row = b % sharing * p->queries + t;
    const bool *mask = c->mask + ((c->mask_rows > 1 ? row : 0) * c->mask_queries +
                                  (c->mask_queries > 1 ? in_row : 0)) * c->slots;
    for (long slot = 0, begin; slot < c->slots;) {
      while (slot < c->slots && !mask[slot]) slot++;
      for (begin = slot; slot < c->slots && mask[slot];) slot++;
      if (begin == slot) break;
      long at = ((row * p->heads.kv_heads + head) * c->slots + begin) * p->form.dim;
      runs[count++] = (Run){c->keys + at * p->form.size, c->values + at * p->form.size, slot - begin};
      keys += slot - begin;
    }
  }
  attend(&p->heads, &p->form, query, head, runs, count, keys, room);
}

// (query [batch, queries, heads, dim], scales [2, kv_heads], and of each block keys, values, mask)
// -> out
XLA_FFI_Error *fp8rl_attend(XLA_FFI_CallFrame *call) {
  if (asks_for_version(call)) return NULL;
  XLA_FFI_Buffer *query = argument(call, 0);
  Masked p = {.heads = heads_of(call, 0, 1), .form = form_of(argument(call, 2))};
  p.batch = query->dims[0], p.queries = query->dims[1], p.count = (call->args.size - 2) / 3;
  for (int i = 0; i < p.count; i++) {
    XLA_FFI_Buffer *k = argument(call, 2 + 3 * i), *v = argument(call, 3 + 3 * i),
                   *mask = argument(call, 4 + 3 * i);
    p.blocks[i] = (Block){k->data, v->data, mask->data, k->dims[0], k->dims[2], mask->dims[0],
                          mask->dims[1]};
  }
  in_parallel(call, p.batch * p.queries * p.heads.kv_heads, attend_masked, &p);
  return NULL;
}
