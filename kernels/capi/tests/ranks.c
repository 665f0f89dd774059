/* Four ranks as threads through the C interface: against plain loops, and what is refused. Compiled as C and as C++ by tests/header.rs;
 * with SEMMOE_TEST_CUDA for the calls for CUDA, which tests/capi-shim runs on the CPU. */
#include "semmoe_kernels.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORLD 4
#define TOKENS 37
#define HIDDEN 24
#define TOP_K 3
#define EXPERTS 8
#define BUFFER 65536
#define WHOLE_OFFSET 8192
#ifdef SEMMOE_TEST_CUDA
#define DEVICE SEMMOE_DEVICE_CUDA
#else
#define DEVICE SEMMOE_DEVICE_CPU
#endif

#define CHECK(condition)                                                                                 \
  do {                                                                                                   \
    if (!(condition)) {                                                                                  \
      fprintf(stderr, "%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #condition, semmoe_last_error()); \
      exit(1);                                                                                           \
    }                                                                                                    \
  } while (0)

static void *buffers[WORLD];
static void *signals[WORLD];
static uint64_t signal_bytes;
static int32_t destinations[TOKENS];

static float part(int rank, int token, int column) { return (float)((rank + 1) * (token * 7 + column) % 97); }

static void *aligned(size_t bytes) {
  void *memory = NULL;
  CHECK(posix_memalign(&memory, 64, bytes) == 0);
  memset(memory, 0, bytes);
  return memory;
}

static semmoe_init_args init_args(uint32_t rank, uint64_t timeout_ms) {
  semmoe_init_args args;
  memset(&args, 0, sizeof args);
  args.struct_bytes = sizeof args;
  args.device = DEVICE;
  args.rank = rank;
  args.world = WORLD;
  args.buffer_bytes = BUFFER;
  args.signal_bytes = signal_bytes;
  args.buffers = buffers;
  args.signals = signals;
  args.max_tokens = 64;
  args.timeout_ms = timeout_ms;
  return args;
}

static void shuffle(semmoe_comm *comm, int rank) {
  int32_t permutation[TOKENS], inverse[TOKENS], offsets[WORLD + 1];
  semmoe_argsort_args sort = {sizeof sort, TOKENS, destinations, permutation, inverse, offsets};
  CHECK(semmoe_argsort(comm, &sort, NULL) == SEMMOE_OK);
  int rows = offsets[rank + 1] - offsets[rank];
  float *out = (float *)aligned((size_t)TOKENS * HIDDEN * 4);
  float *own = (float *)buffers[rank];
  for (int i = 0; i < TOKENS * HIDDEN; i++) own[i] = part(rank, i / HIDDEN, i % HIDDEN);
  semmoe_reduce_scatter_args scatter;
  memset(&scatter, 0, sizeof scatter);
  scatter.struct_bytes = sizeof scatter;
  scatter.tokens = TOKENS;
  scatter.hidden = HIDDEN;
  scatter.dtype = SEMMOE_F32;
  scatter.permutation = permutation;
  scatter.offsets = offsets;
  scatter.capacity = (uint64_t)rows;
  scatter.out = out;
  CHECK(semmoe_reduce_scatter(comm, &scatter, NULL) == SEMMOE_OK);
  for (int i = 0; i < rows; i++) {
    int token = permutation[offsets[rank] + i];
    CHECK(destinations[token] == rank && inverse[token] == offsets[rank] + i);
    for (int c = 0; c < HIDDEN; c++) {
      float sum = part(0, token, c) + part(1, token, c) + part(2, token, c) + part(3, token, c);
      CHECK(out[i * HIDDEN + c] == sum);
    }
  }
  semmoe_allgather_args gather;
  memset(&gather, 0, sizeof gather);
  gather.struct_bytes = sizeof gather;
  gather.tokens = TOKENS;
  gather.hidden = HIDDEN;
  gather.dtype = SEMMOE_F32;
  gather.out_offset = WHOLE_OFFSET;
  gather.permutation = permutation;
  gather.offsets = offsets;
  gather.capacity = (uint64_t)rows;
  gather.rows = out;
  CHECK(semmoe_allgather(comm, &gather, NULL) == SEMMOE_OK);
  semmoe_all_reduce_args reduce = {sizeof reduce, TOKENS, HIDDEN, SEMMOE_F32, 0, 0, 0};
  CHECK(semmoe_all_reduce(comm, &reduce, NULL) == SEMMOE_OK);
  CHECK(memcmp(own, (char *)own + WHOLE_OFFSET, (size_t)TOKENS * HIDDEN * 4) == 0);
  free(out);
}

/* Token t of rank r is r * 100 + t; expert e multiplies by e + 1; ranks have different numbers of tokens, one has none. */
static void experts(semmoe_comm *comm, int rank) {
  int n = rank * 3;
  int32_t rank_of[EXPERTS], ids[9 * TOP_K], offsets[WORLD + 1], sent[9 * WORLD];
  float weights[9 * TOP_K];
  float *x = (float *)aligned(9 * 4), *out = (float *)aligned(9 * 4);
  for (int e = 0; e < EXPERTS; e++) rank_of[e] = (e * 3 + 1) % WORLD;
  for (int t = 0; t < n; t++) {
    x[t] = (float)(rank * 100 + t);
    for (int k = 0; k < TOP_K; k++) {
      ids[t * TOP_K + k] = k == 2 && t == 1 ? SEMMOE_NONE : (t + rank + k * 2) % EXPERTS;
      weights[t * TOP_K + k] = (float)(k + 1);
    }
  }
  semmoe_dispatch_args args;
  memset(&args, 0, sizeof args);
  args.struct_bytes = sizeof args;
  args.tokens = (uint64_t)n;
  args.hidden = 1;
  args.dtype = SEMMOE_F32;
  args.top_k = TOP_K;
  args.experts_total = EXPERTS;
  args.capacity = 64;
  args.rank_of_expert = rank_of;
  args.x = x;
  args.experts = ids;
  args.weights = weights;
  args.rows_offset = 0;
  args.tokens_offset = 1024;
  args.experts_offset = 2048;
  args.weights_offset = 4096;
  args.source_offsets = offsets;
  args.sent_rows = sent;
  CHECK(semmoe_dispatch(comm, &args, NULL) == SEMMOE_OK);
  char *own = (char *)buffers[rank];
  float *rows = (float *)own, *got_weights = (float *)(own + 4096);
  int32_t *tokens = (int32_t *)(own + 1024), *got = (int32_t *)(own + 2048);
  for (int source = 0; source < WORLD; source++) {
    for (int row = offsets[source]; row < offsets[source + 1]; row++) {
      CHECK(rows[row] == (float)(source * 100 + tokens[row]));
      float factor = 0;
      for (int k = 0; k < TOP_K && got[row * TOP_K + k] != SEMMOE_NONE; k++) {
        CHECK(rank_of[got[row * TOP_K + k]] == rank);
        factor += got_weights[row * TOP_K + k] * (float)(got[row * TOP_K + k] + 1);
      }
      rows[row] *= factor;
    }
  }
  semmoe_combine_args home = {sizeof home, (uint64_t)n, 1, SEMMOE_F32, 0, 64, 0, sent, out};
  CHECK(semmoe_combine(comm, &home, NULL) == SEMMOE_OK);
  for (int t = 0; t < n; t++) {
    float factor = 0;
    for (int k = 0; k < TOP_K; k++)
      if (ids[t * TOP_K + k] != SEMMOE_NONE) factor += weights[t * TOP_K + k] * (float)(ids[t * TOP_K + k] + 1);
    CHECK(out[t] == x[t] * factor);
  }
  free(x);
  free(out);
}

#ifndef SEMMOE_TEST_CUDA
/* One rank calls something else: all are told, and go on. */
static void disagree(semmoe_comm *comm, int rank) {
  semmoe_all_reduce_args args = {sizeof args, rank == 2 ? 5u : 4u, 8, SEMMOE_F32, 0, 0, 4096};
  CHECK(semmoe_all_reduce(comm, &args, NULL) == SEMMOE_DISAGREE);
  CHECK(strstr(semmoe_last_error(), "mismatched tokens") != NULL);
  args.tokens = 4;
  CHECK(semmoe_all_reduce(comm, &args, NULL) == SEMMOE_OK);
}
#endif

static void *one_rank(void *argument) {
  int rank = (int)(intptr_t)argument;
  semmoe_init_args args = init_args((uint32_t)rank, 60000);
  semmoe_comm *comm = NULL;
  CHECK(semmoe_init(&args, &comm) == SEMMOE_OK);
  for (int turn = 0; turn < 3; turn++) {
    shuffle(comm, rank);
    experts(comm, rank);
#ifndef SEMMOE_TEST_CUDA
    disagree(comm, rank);
#endif
  }
  CHECK(semmoe_check(comm) == SEMMOE_OK);
  semmoe_free(comm);
  return NULL;
}

/* Refused before anything happens: one rank alone, which would wait for the others if it took part. */
static void refused(void) {
  semmoe_init_args args = init_args(0, 50);
  semmoe_comm *comm = NULL;
  args.struct_bytes--;
  CHECK(semmoe_init(&args, &comm) == SEMMOE_INVALID && comm == NULL);
  args = init_args(0, 50);
  args.device = SEMMOE_DEVICE_CUDA;
  CHECK(semmoe_has_cuda() != 0 || semmoe_init(&args, &comm) == SEMMOE_NOT_BUILT);
  args = init_args(WORLD, 50);
  CHECK(semmoe_init(&args, &comm) == SEMMOE_OUT_OF_RANGE);
  args = init_args(0, 0);
  CHECK(semmoe_init(&args, &comm) == SEMMOE_INVALID);
  args = init_args(0, 50);
  args.world = 65;
  CHECK(semmoe_init(&args, &comm) == SEMMOE_INVALID);
  args = init_args(0, 50);
  args.signal_bytes = 8;
  CHECK(semmoe_init(&args, &comm) == SEMMOE_TOO_LARGE);
  CHECK(semmoe_init(NULL, &comm) == SEMMOE_INVALID && semmoe_init(&args, NULL) == SEMMOE_INVALID);
  args = init_args(0, 50);
  CHECK(semmoe_init(&args, &comm) == SEMMOE_OK);
#ifndef SEMMOE_TEST_CUDA
  semmoe_comm *second = NULL;
  CHECK(semmoe_init(&args, &second) == SEMMOE_INVALID && second == NULL);
#endif

  float *rows = (float *)aligned(4096);
  int32_t bad[4] = {0, 1, 4, 0}, ends[WORLD + 1] = {0, 1, 2, 3, 4}, a[4], b[4], c[WORLD + 1];
  semmoe_argsort_args sort = {sizeof sort, 4, bad, a, b, c};
#ifndef SEMMOE_TEST_CUDA
  int32_t negative[4] = {0, -1, 0, 0};
  CHECK(semmoe_argsort(comm, &sort, NULL) == SEMMOE_OUT_OF_RANGE);
  CHECK(strcmp(semmoe_last_error(), "destination 2 is 4, expected below 4") == 0);
  sort.destinations = negative;
  CHECK(semmoe_argsort(comm, &sort, NULL) == SEMMOE_OUT_OF_RANGE);
#endif
  sort.destinations = NULL;
  CHECK(semmoe_argsort(comm, &sort, NULL) == SEMMOE_INVALID);
  sort.n = 65;
  CHECK(semmoe_argsort(comm, &sort, NULL) == SEMMOE_TOO_LARGE);
  CHECK(semmoe_argsort(comm, NULL, NULL) == SEMMOE_INVALID && semmoe_argsort(NULL, &sort, NULL) == SEMMOE_INVALID);

  semmoe_reduce_scatter_args good;
  memset(&good, 0, sizeof good);
  good.struct_bytes = sizeof good;
  good.tokens = 4;
  good.hidden = 8;
  good.dtype = SEMMOE_F32;
  good.offsets = ends;
  good.capacity = 4;
  good.out = rows;
#define REFUSED(change, status)                                      \
  do {                                                               \
    semmoe_reduce_scatter_args wrong = good;                         \
    change;                                                          \
    CHECK(semmoe_reduce_scatter(comm, &wrong, NULL) == (status));    \
  } while (0)
  REFUSED(wrong.dtype = 3, SEMMOE_INVALID);
  REFUSED(wrong.part_offset = 8, SEMMOE_MISALIGNED);
  REFUSED(wrong.part_offset = BUFFER - 64, SEMMOE_TOO_LARGE);
  REFUSED(wrong.part_offset = (uint64_t)0 - 16, SEMMOE_TOO_LARGE);
  REFUSED(wrong.tokens = 65, SEMMOE_TOO_LARGE);
  REFUSED(wrong.hidden = (uint64_t)1 << 40, SEMMOE_TOO_LARGE);
  REFUSED(wrong.out = NULL, SEMMOE_INVALID);
  REFUSED(wrong.out = (char *)rows + 4, SEMMOE_MISALIGNED);
  REFUSED(wrong.out = buffers[0], SEMMOE_INVALID);
  REFUSED(wrong.residual = rows, SEMMOE_INVALID);
  REFUSED(wrong.norm_weight = rows + 512, SEMMOE_INVALID);
#ifndef SEMMOE_TEST_CUDA
  /* On the CPU these are seen before any work as well. */
  int32_t twice[4] = {0, 1, 1, 3}, back[WORLD + 1] = {0, 3, 2, 3, 4};
  REFUSED(wrong.capacity = 0, SEMMOE_TOO_LARGE);
  REFUSED(wrong.offsets = back, SEMMOE_OUT_OF_RANGE);
  REFUSED(wrong.tokens = 5, SEMMOE_OUT_OF_RANGE);
  REFUSED(wrong.permutation = bad, SEMMOE_OUT_OF_RANGE);
  REFUSED(wrong.permutation = twice, SEMMOE_OUT_OF_RANGE);
  /* The first call that takes part waits for the others, and names one. */
  CHECK(semmoe_reduce_scatter(comm, &good, NULL) == SEMMOE_TIMED_OUT);
  CHECK(strcmp(semmoe_last_error(), "rank 1 did not arrive at epoch 1 within 50 ms") == 0);
  CHECK(semmoe_reduce_scatter(comm, &good, NULL) == SEMMOE_TIMED_OUT);
#else
  /* The device sees it: the kernel stops, and later calls tell why. */
  sort.n = 4;
  sort.destinations = bad;
  CHECK(semmoe_argsort(comm, &sort, NULL) == SEMMOE_OK);
  CHECK(semmoe_check(comm) == SEMMOE_OUT_OF_RANGE);
  CHECK(strcmp(semmoe_last_error(), "destination or expert 2 is out of range") == 0);
  CHECK(semmoe_reduce_scatter(comm, &good, NULL) == SEMMOE_OUT_OF_RANGE);
#endif
  semmoe_free(comm);
  semmoe_free(NULL);
  free(rows);
}

int main(void) {
  CHECK(semmoe_abi_version() == SEMMOE_ABI_VERSION);
  uint64_t bytes = 0;
  CHECK(semmoe_signal_bytes(DEVICE, WORLD, &signal_bytes) == SEMMOE_OK && signal_bytes > 0);
  CHECK(semmoe_signal_bytes(DEVICE, 0, &bytes) == SEMMOE_INVALID);
  CHECK(semmoe_signal_bytes(7, WORLD, &bytes) == SEMMOE_INVALID);
  for (int rank = 0; rank < WORLD; rank++) {
    buffers[rank] = aligned(BUFFER);
    signals[rank] = aligned(signal_bytes);
  }
  for (int token = 0; token < TOKENS; token++) destinations[token] = token * 5 % 3; /* rank 3 gets none */
  pthread_t threads[WORLD];
  for (int rank = 0; rank < WORLD; rank++)
    CHECK(pthread_create(&threads[rank], NULL, one_rank, (void *)(intptr_t)rank) == 0);
  for (int rank = 0; rank < WORLD; rank++) CHECK(pthread_join(threads[rank], NULL) == 0);
  for (int rank = 0; rank < WORLD; rank++) memset(signals[rank], 0, signal_bytes);
  refused();
  for (int rank = 0; rank < WORLD; rank++) {
    free(buffers[rank]);
    free(signals[rank]);
  }
  puts("ok");
  return 0;
}
