// What the CPU kernels share: vectors, XLA's calling convention (XLA FFI, the C interface), threads.
#pragma once

#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float loose_vec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2)));
typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1)));

#define INLINE static inline __attribute__((always_inline))

INLINE vec splat(float x) { return x - (vec){0}; }
INLINE vec load(const float *at) { return *(const loose_vec *)at; }
INLINE void store(float *at, vec x) { *(loose_vec *)at = x; }
INLINE vec where(ints mask, vec x, vec y) { return (vec)((mask & (ints)x) | (~mask & (ints)y)); }

// float32 of bfloat16 and of e4m3, by their bits: XLA has the CPU flush denormal numbers.
INLINE vec widen_bf16(const uint16_t *at) {
  return (vec)(__builtin_convertvector(*(const halves *)at, words) << 16);
}

INLINE vec widen_e4m3(const uint8_t *at) {
#if defined(__F16C__)
  // as float16, whose exponent has a bias of 15 where e4m3's is 7
  typedef uint16_t codes __attribute__((vector_size(LANES * 2)));
  codes code = __builtin_convertvector(*(const bytes *)at, codes), low = code & 0x7f;
  codes half = (code & 0x80) << 8 | low << 7 | ((codes)(low == 0x7f) & 0x7e00);
#if LANES == 16
  return (vec)_mm512_cvtph_ps((__m256i)half) * 256.0f;
#else
  return (vec)_mm256_cvtph_ps((__m128i)half) * 256.0f;
#endif
#else
  words code = __builtin_convertvector(*(const bytes *)at, words), low = code & 0x7f;
  vec normal = (vec)((low << 20) + (120u << 23));
  vec small = (vec)((low << 20) + (121u << 23)) - 0x1p-6f;
  vec size = where(low < 8, small, where(low == 0x7f, splat(NAN), normal));
  return (vec)((words)size | (code & 0x80) << 24);
#endif
}

INLINE vec widen_e5m2(const uint8_t *at) {
#if defined(__F16C__)
  // the upper half of a float16
  typedef uint16_t codes __attribute__((vector_size(LANES * 2)));
  codes half = __builtin_convertvector(*(const bytes *)at, codes) << 8;
#if LANES == 16
  return _mm512_cvtph_ps((__m256i)half);
#else
  return _mm256_cvtph_ps((__m128i)half);
#endif
#else
  words code = __builtin_convertvector(*(const bytes *)at, words), low = code & 0x7f;
  vec normal = (vec)((low << 21) + (112u << 23));
  vec small = (vec)((low << 21) + (113u << 23)) - 0x1p-14f;
  vec large = where(low == 0x7c, splat(INFINITY), splat(NAN));
  vec size = where(low < 4, small, where(low >= 0x7c, large, normal));
  return (vec)((words)size | (code & 0x80) << 24);
#endif
}

INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long most(long a, long b) { return a > b ? a : b; }

// A buffer that this thread keeps from call to call, aligned to cache lines.
static _Thread_local struct { void *at; size_t size; } scratch_;

INLINE void *scratch(size_t size) {
  if (size > scratch_.size) {
    free(scratch_.at);
    size = (size + 4095) / 4096 * 4096;
    scratch_.at = aligned_alloc(64, size), scratch_.size = scratch_.at ? size : 0;
    if (!scratch_.at) abort();
  }
  return scratch_.at;
}

INLINE XLA_FFI_Buffer *argument(XLA_FFI_CallFrame *call, int i) { return call->args.args[i]; }
INLINE XLA_FFI_Buffer *result(XLA_FFI_CallFrame *call, int i) { return call->rets.rets[i]; }

// XLA asks each handler for its version once, when the handler is registered.
INLINE bool asks_for_version(XLA_FFI_CallFrame *call) {
  XLA_FFI_InternalExtension *extension = call->extension_start;
  if (!extension || extension->type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  metadata->traits = 0;
  return true;
}

// body(work, i) for i = 0 ... count - 1, on this thread and on those of XLA's pool that are free.
typedef struct {
  void (*body)(const void *work, long i);
  const void *work;
  long count;
  atomic_long next, ended;
  atomic_int holders;
} Job;

static void take_part(Job *job) {
  for (long i; (i = atomic_fetch_add(&job->next, 1)) < job->count;) {
    job->body(job->work, i);
    atomic_fetch_add(&job->ended, 1);
  }
}

static void leave(Job *job) {
  if (atomic_fetch_sub(&job->holders, 1) == 1) free(job);
}

static void help(void *job) {
  take_part(job);
  leave(job);
}

static inline void in_parallel(XLA_FFI_CallFrame *call, long count, void (*body)(const void *, long),
                        const void *work) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args asked = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL,
                                              call->ctx, &threads};
  XLA_FFI_Error *failed = call->api->XLA_FFI_ThreadPool_NumThreads(&asked);
  if (failed) {
    XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, failed};
    call->api->XLA_FFI_Error_Destroy(&args);
    threads = 1;
  }
  long helpers = (threads < count ? threads : count) - 1;
  Job *job = helpers > 0 ? malloc(sizeof *job) : NULL;
  if (!job) {
    for (long i = 0; i < count; i++) body(work, i);
    return;
  }
  *job = (Job){body, work, count, 0, 0, 1};
  for (long i = 0; i < helpers; i++) {
    atomic_fetch_add(&job->holders, 1);
    XLA_FFI_ThreadPool_Schedule_Args args = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL,
                                             call->ctx, help, job};
    failed = call->api->XLA_FFI_ThreadPool_Schedule(&args);
    if (failed) {
      XLA_FFI_Error_Destroy_Args ended = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, failed};
      call->api->XLA_FFI_Error_Destroy(&ended);
      leave(job);
    }
  }
  take_part(job);
  // a helper that has begun ends its part; one that has not finds nothing to do
  for (long spins = 0; atomic_load(&job->ended) < count; spins++)
    if (spins > 4096) sched_yield();
  leave(job);
}
