/* Collectives that move tokens to the ranks of their experts: the C interface of libsemmoe_kernels.so.
 *
 * P = ranks (world), n = tokens, H = hidden (width of a row), k = experts per token, N = experts. tests/reference defines what each
 * operation computes, bit for bit; kernels/README.md explains it.
 *
 * Rules for all functions
 * - They return SEMMOE_OK or a positive status; semmoe_last_error() then returns one sentence for the calling thread.
 * - Everything that the host can check is checked before any work: null and misaligned pointers, ranges, sizes against the symmetric
 *   buffer. A rejected call does not take part in the collective, so the ranks stay in step.
 * - After semmoe_init nothing is allocated, and no stream is synchronised. With CUDA a call only launches work on the given CUstream (and
 *   may be captured in a graph); on the CPU it returns when done, or when a peer did not arrive within the timeout.
 * - Every rank makes the same calls with the same shapes in the same order. The CPU compares shapes and orders and fails with
 *   SEMMOE_DISAGREE on all ranks.
 * - Ids and positions are int32. Element pointers and offsets into the symmetric buffer are multiples of 16 bytes; int32 and float
 *   arrays are multiples of 4.
 * - Only one thread at a time may use a communicator (else SEMMOE_BUSY). Structures begin with their size; reserved fields are 0.
 * - With CUDA, pointers in arguments are device pointers. Errors that only the device can detect (ids out of range, too many rows for
 *   `capacity`, a rank that never arrives, ranks that disagree) stop the kernel with a trap. semmoe_check and every later call then report
 *   the cause; neither the communicator nor the GPU's context can be used any more. All GPUs of a group must be of one kind and use the
 *   same version of this library.
 */
#ifndef SEMMOE_KERNELS_H
#define SEMMOE_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SEMMOE_ABI_VERSION 1u
/* Maximum number of ranks in a communicator. */
#define SEMMOE_MAX_WORLD 64u
/* Alignment in bytes of element pointers and of offsets into the symmetric buffer. */
#define SEMMOE_ALIGNMENT 16u
/* As an expert: the slot is unused. As a row: the token was not sent to that rank. */
#define SEMMOE_NONE (-1)

/* status */
#define SEMMOE_OK 0
#define SEMMOE_INVALID 1      /* an invalid argument: null, size of a structure, dtype, world */
#define SEMMOE_OUT_OF_RANGE 2 /* an id, position or offset out of its range */
#define SEMMOE_MISALIGNED 3
#define SEMMOE_TOO_LARGE 4    /* exceeds the symmetric buffer, or a limit given to init */
#define SEMMOE_DISAGREE 5     /* ranks passed different shapes or orders; on the CPU the communicator can continue */
#define SEMMOE_TIMED_OUT 6    /* a rank did not arrive; the message states rank and epoch; the communicator can no longer be used */
#define SEMMOE_PEER_FAILED 7  /* a rank left or failed; the communicator can no longer be used */
#define SEMMOE_NOT_BUILT 8    /* this library was built without CUDA, or without GPU kernels */
#define SEMMOE_DEVICE 9       /* there is no CUDA driver, or it refused a call, as it does after a trap */
#define SEMMOE_BUSY 10        /* another thread is in a call on this communicator */
#define SEMMOE_INTERNAL 11    /* a bug in this library */

/* semmoe_init_args.device */
#define SEMMOE_DEVICE_CPU 0u
#define SEMMOE_DEVICE_CUDA 1u

/* dtype */
#define SEMMOE_F32 0u
#define SEMMOE_F16 1u
#define SEMMOE_BF16 2u

/* semmoe_multicast_args.operations: the operations that use the NVLink switch */
#define SEMMOE_MULTICAST_REDUCE_SCATTER 1u
#define SEMMOE_MULTICAST_ALLGATHER 2u

/* One rank of a group. */
typedef struct semmoe_comm semmoe_comm;

typedef struct semmoe_init_args {
  uint64_t struct_bytes; /* sizeof(semmoe_init_args) */
  uint32_t device;       /* SEMMOE_DEVICE_* */
  int32_t ordinal;       /* CUDA device; 0 on the CPU */
  uint32_t rank;         /* below world */
  uint32_t world;        /* P, 1 to SEMMOE_MAX_WORLD */
  uint64_t buffer_bytes; /* size of each rank's symmetric buffer, equal on all ranks */
  uint64_t signal_bytes; /* size of each rank's signals, at least semmoe_signal_bytes() */
  void *const *buffers;  /* [P] host array: rank p's symmetric buffer, as mapped here */
  void *const *signals;  /* [P] host array: rank p's signals, as mapped here; zeroed before the first rank's init */
  uint64_t max_tokens;   /* maximum tokens (n) per call */
  uint64_t timeout_ms;   /* maximum time for which a call waits for a peer, above 0 */
} semmoe_init_args;

/* Stable order of n items by destination rank. */
typedef struct semmoe_argsort_args {
  uint64_t struct_bytes;
  uint64_t n;
  const int32_t *destinations; /* [n], each in 0..P-1 */
  int32_t *permutation;        /* [n] out: the item at each sorted position */
  int32_t *inverse;            /* [n] out: the sorted position of each item */
  int32_t *offsets;            /* [P + 1] out: rank p has the positions offsets[p] .. offsets[p + 1] - 1 */
} semmoe_argsort_args;

/* out[i] = sum over ranks q of part_q[permutation[offsets[rank] + i]], in f32 in rank order, rounded once. With `norm_weight`,
 * the residual is added and the sum normed: h = sum + residual[token], residual_out[i] = h, out[i] = h * inverse_rms(h) * norm_weight. */
typedef struct semmoe_reduce_scatter_args {
  uint64_t struct_bytes;
  uint64_t tokens;            /* n */
  uint64_t hidden;            /* H */
  uint32_t dtype;
  float epsilon;              /* for the norm */
  uint64_t part_offset;       /* bytes into every rank's symmetric buffer: part [n, H] */
  const int32_t *permutation; /* [n], or null for the tokens' own order (a plain reduce-scatter) */
  const int32_t *offsets;     /* [P + 1], or null for even parts (the first n mod P ranks have one more row) */
  uint64_t capacity;          /* capacity of out (and residual_out) in rows */
  void *out;                  /* [capacity, H] */
  const void *residual;       /* [n, H], required with norm_weight */
  const void *norm_weight;    /* [H], or null for no norm */
  void *residual_out;         /* [capacity, H], required with norm_weight */
} semmoe_reduce_scatter_args;

/* out_q[permutation[offsets[rank] + i]] = rows[i], on every rank q: the exact inverse placement. */
typedef struct semmoe_allgather_args {
  uint64_t struct_bytes;
  uint64_t tokens;            /* n */
  uint64_t hidden;            /* H */
  uint32_t dtype;
  uint32_t reserved;
  uint64_t out_offset;        /* bytes into every rank's symmetric buffer: out [n, H] */
  const int32_t *permutation; /* [n], or null */
  const int32_t *offsets;     /* [P + 1], or null */
  uint64_t capacity;          /* number of rows in `rows` */
  const void *rows;           /* [capacity, H] */
} semmoe_allgather_args;

/* out = sum over ranks q of part_q, on every rank. part and out may be the same memory. */
typedef struct semmoe_all_reduce_args {
  uint64_t struct_bytes;
  uint64_t tokens;      /* n */
  uint64_t hidden;      /* H */
  uint32_t dtype;
  uint32_t reserved;
  uint64_t part_offset; /* bytes into every rank's symmetric buffer: part [n, H] */
  uint64_t out_offset;  /* bytes into every rank's symmetric buffer: out [n, H] */
} semmoe_all_reduce_args;

/* Sends every token once to each rank that hosts one of its experts, including this rank. n may differ between ranks, all other values
 * are equal. Received rows are packed by source rank, then in the order of the source's tokens; R = received rows, at most `capacity`. */
typedef struct semmoe_dispatch_args {
  uint64_t struct_bytes;
  uint64_t tokens;               /* n of this rank */
  uint64_t hidden;               /* H */
  uint32_t dtype;
  uint32_t top_k;                /* k, 1 to 64 */
  uint64_t experts_total;        /* N */
  uint64_t capacity;             /* capacity of the receiving arrays in rows */
  const int32_t *rank_of_expert; /* [N], each in 0..P-1, equal on all ranks */
  const void *x;                 /* [n, H] */
  const int32_t *experts;        /* [n, k], each in 0..N-1 or SEMMOE_NONE; those of one token are distinct */
  const float *weights;          /* [n, k] */
  uint64_t rows_offset;          /* into the symmetric buffer, received: [capacity, H] of dtype */
  uint64_t tokens_offset;        /* received: [capacity] int32, the token's index on its source */
  uint64_t experts_offset;       /* received: [capacity, k] int32, the token's experts on this rank, then SEMMOE_NONE */
  uint64_t weights_offset;       /* received: [capacity, k] float, their weights, then 0 */
  int32_t *source_offsets;       /* [P + 1] out: rows from rank p are source_offsets[p] .. source_offsets[p + 1] - 1 */
  int32_t *sent_rows;            /* [n, P] out: token t's row on rank q, or SEMMOE_NONE; combine needs it */
} semmoe_dispatch_args;

/* out[t] = sum over ranks q of sums_q[sent_rows[t, q]], over the ranks to which t was sent, in f32 in rank order, rounded once; zeros if
 * there are none. sums_q[i] is rank q's result for its received row i: the sum of weight x expert over the row's experts there. */
typedef struct semmoe_combine_args {
  uint64_t struct_bytes;
  uint64_t tokens;          /* n of this rank */
  uint64_t hidden;          /* H */
  uint32_t dtype;
  uint32_t reserved;
  uint64_t capacity;        /* rows of sums, as in dispatch */
  uint64_t sums_offset;     /* into the symmetric buffer: [capacity, H] */
  const int32_t *sent_rows; /* [n, P] of dispatch */
  void *out;                /* [n, H] */
} semmoe_combine_args;

/* One address for the symmetric buffers of all ranks (NVLink SHARP): a multicast object of their GPUs, to which every rank has bound its
 * buffer from the first byte, mapped here. From then on, calls of `operations` use the NVLink switch, except for the fused norm and for
 * rows that are not multiples of 16 bytes, which still use the peers' memory. The switch adds in its own order: a reduce-scatter is then
 * equal only up to rounding, while an allgather has the same bits. All ranks must do this between the same calls (else
 * SEMMOE_DISAGREE). */
typedef struct semmoe_multicast_args {
  uint64_t struct_bytes;
  void *address;       /* null with operations 0, which stops using the switch */
  uint64_t bytes;      /* size at the address, at least buffer_bytes */
  uint32_t operations; /* SEMMOE_MULTICAST_*, or 0 */
  uint32_t reserved;
} semmoe_multicast_args;

/* SEMMOE_ABI_VERSION of the library; compare it before any other call. */
uint32_t semmoe_abi_version(void);

/* 1 if the library was built with CUDA and GPU kernels and finds a driver, else 0. */
int32_t semmoe_has_cuda(void);

/* One sentence about the calling thread's last error, valid until its next call; never null. */
const char *semmoe_last_error(void);

/* Bytes of signals that one rank needs, for any number of tokens. */
int32_t semmoe_signal_bytes(uint32_t device, uint32_t world, uint64_t *bytes);

/* Creates this rank's end of a group. The caller still owns buffers and signals, and keeps them mapped until the last rank has called
 * semmoe_free. Does not wait for the other ranks. */
int32_t semmoe_init(const semmoe_init_args *args, semmoe_comm **comm);

/* Frees a communicator. Peers that wait for this rank fail at once on the CPU, and at their timeout with CUDA. With CUDA, all launched
 * work must have ended before. Null is allowed. */
void semmoe_free(semmoe_comm *comm);

/* Reports asynchronous errors: SEMMOE_OK, or the reason why a kernel stopped (CUDA). Does not wait. */
int32_t semmoe_check(semmoe_comm *comm);

/* 1 if the communicator's GPU supports multicast objects, else 0. */
int32_t semmoe_has_multicast(semmoe_comm *comm);

/* Starts or stops routing calls through the NVLink switch; launches nothing. Returns SEMMOE_DEVICE if semmoe_has_multicast is 0. */
int32_t semmoe_multicast(semmoe_comm *comm, const semmoe_multicast_args *args);

/* `stream` is a CUstream of the ordinal's primary context (null: its default stream); null on the CPU. */
int32_t semmoe_argsort(semmoe_comm *comm, const semmoe_argsort_args *args, void *stream);
int32_t semmoe_reduce_scatter(semmoe_comm *comm, const semmoe_reduce_scatter_args *args, void *stream);
int32_t semmoe_allgather(semmoe_comm *comm, const semmoe_allgather_args *args, void *stream);
int32_t semmoe_all_reduce(semmoe_comm *comm, const semmoe_all_reduce_args *args, void *stream);
int32_t semmoe_dispatch(semmoe_comm *comm, const semmoe_dispatch_args *args, void *stream);
int32_t semmoe_combine(semmoe_comm *comm, const semmoe_combine_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif
