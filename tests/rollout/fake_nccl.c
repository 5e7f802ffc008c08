/* In place of libnccl and libcuda: writes down what rank 0 does, one line a call, and the bytes
   that it broadcasts behind the line. FAKE_NCCL names the file; FAKE_NCCL_STUCK: the call (sum,
   broadcast) after which nothing arrives; FAKE_NCCL_FAILS: the group cannot be joined. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned char internal[128]; } Id;

static FILE *out(void) { return fopen(getenv("FAKE_NCCL"), "ab"); }
static int asked = 0;
static const char *last = "";

int ncclGetUniqueId(Id *id) { for (int i = 0; i < 128; i++) id->internal[i] = (unsigned char)(i * 3); return 0; }
const char *ncclGetErrorString(int code) { return code == 2 ? "unhandled system error" : "invalid argument"; }
int ncclCommInitRank(void **comm, int size, Id id, int rank) {
  if (getenv("FAKE_NCCL_FAILS")) return 2;
  if (rank != 0 || id.internal[7] != 21) return 4;
  FILE *f = out(); fprintf(f, "join %d\n", size); fclose(f);
  *comm = (void *)0x1234;
  return 0;
}
int ncclAllReduce(const void *in, void *result, size_t count, int type, int op, void *comm, void *stream) {
  if (comm != (void *)0x1234 || in != result || op != 0 || stream) return 4;
  FILE *f = out(); last = "sum"; fprintf(f, "sum %zu %d\n", count, type); fclose(f);
  return 0;
}
int ncclBroadcast(const void *in, void *result, size_t count, int type, int root, void *comm, void *stream) {
  static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1};
  if (comm != (void *)0x1234 || in != result || root != 0 || stream) return 4;
  FILE *f = out(); last = "broadcast"; fprintf(f, "broadcast %zu %d\n", count, type); fwrite(in, sizes[type], count, f); fclose(f);
  return 0;
}
int ncclCommAbort(void *comm) { FILE *f = out(); fprintf(f, "abort\n"); fclose(f); return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)0x5678; return 0; }
int cuCtxSetCurrent(void *context) { return context == (void *)0x5678 ? 0 : 201; }
int cuStreamQuery(void *stream) {
  const char *stuck = getenv("FAKE_NCCL_STUCK");
  return (stuck && !strcmp(stuck, last)) || asked++ % 2 ? 600 : 0;
}
