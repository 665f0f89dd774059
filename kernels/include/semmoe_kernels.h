/* Collectives that move tokens to the ranks of their experts: the C interface of libsemmoe_kernels.so.
 *
 * P = ranks (world), n = tokens, H = hidden (width of a row), k = experts per token, N = experts. What each operation computes, bit
 * for bit, is said by kernels/src/reference.rs; kernels/README.md explains it.
 *
 * Rules for all functions
 * - They return SEMMOE_OK or a status above 0; semmoe_last_error() then has one sentence for the calling thread.
 * - Everything that the host can see is checked before any work: null and misaligned pointers, ranges, sizes against the symmetric
 *   buffer. A refused call took no part in the collective, so that the ranks stay in step.
 * - After semmoe_init nothing is allocated, and no stream is synchronised: with CUDA a call only launches on the given CUstream (and
 *   may be captured in a graph); on the CPU it returns when done, or when a peer did not come within the timeout.
 * - Every rank makes the same calls with the same shapes in the same order. The CPU compares shapes and orders and fails with
 *   SEMMOE_DISAGREE on all ranks.
 * - Ids and positions are int32. Element pointers and offsets into the symmetric buffer are multiples of 16 bytes; int32 and float
 *   arrays multiples of 4.
 * - One communicator is used by one thread at a time (else SEMMOE_BUSY). Structures begin with their size; reserved fields are 0.
 * - With CUDA, pointers in arguments are device pointers. What only the device sees (ids out of range, too many rows for `capacity`,
 *   a rank that never arrives, ranks that disagree) stops the kernel with a trap: semmoe_check and every later call tell why, and the
 *   communicator is spent, as is the GPU's context. All GPUs of a group are alike, each on the same version of this library.
 */
#ifndef SEMMOE_KERNELS_H
#define SEMMOE_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SEMMOE_ABI_VERSION 1u
/* The most ranks of a communicator. */
#define SEMMOE_MAX_WORLD 64u
/* Alignment in bytes of element pointers and of offsets into the symmetric buffer. */
#define SEMMOE_ALIGNMENT 16u
/* In place of an expert: the slot is not used. In place of a row: the token was not sent there. */
#define SEMMOE_NONE (-1)

/* status */
#define SEMMOE_OK 0
#define SEMMOE_INVALID 1      /* an argument that fits nothing: null, size of a structure, dtype, world */
#define SEMMOE_OUT_OF_RANGE 2 /* an id, position or offset out of its range */
#define SEMMOE_MISALIGNED 3
#define SEMMOE_TOO_LARGE 4    /* past the symmetric buffer, or past what init was told */
#define SEMMOE_DISAGREE 5     /* ranks gave different shapes or orders; on the CPU the communicator can go on */
#define SEMMOE_TIMED_OUT 6    /* a rank did not arrive; the message names rank and epoch; the communicator is spent */
#define SEMMOE_PEER_FAILED 7  /* a rank left or failed; the communicator is spent */
#define SEMMOE_NOT_BUILT 8    /* this library was built without CUDA, or without kernels for it */
#define SEMMOE_DEVICE 9       /* there is no CUDA driver, or it refused, as after a trap */
#define SEMMOE_BUSY 10        /* another thread is in a call on this communicator */
#define SEMMOE_INTERNAL 11    /* a defect of this library */

/* semmoe_init_args.device */
#define SEMMOE_DEVICE_CPU 0u
#define SEMMOE_DEVICE_CUDA 1u

/* dtype */
#define SEMMOE_F32 0u
#define SEMMOE_F16 1u
#define SEMMOE_BF16 2u

/* semmoe_multicast_args.operations: which of them go through the switch */
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
  uint64_t buffer_bytes; /* of each rank's symmetric buffer, the same on all ranks */
  uint64_t signal_bytes; /* of each rank's signals, at least semmoe_signal_bytes() */
  void *const *buffers;  /* [P] host array: rank p's symmetric buffer, as mapped here */
  void *const *signals;  /* [P] host array: rank p's signals, as mapped here; zeroed before the first rank's init */
  uint64_t max_tokens;   /* the most tokens (n) of one call */
  uint64_t timeout_ms;   /* the most one call waits for a peer, above 0 */
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

/* out[i] = sum over ranks q of part_q[permutation[offsets[rank] + i]], in f32 in rank order, rounded once. With `norm_weight` the
 * residual is added and normed as well: h = sum + residual[token], residual_out[i] = h, out[i] = h * inverse_rms(h) * norm_weight. */
typedef struct semmoe_reduce_scatter_args {
  uint64_t struct_bytes;
  uint64_t tokens;            /* n */
  uint64_t hidden;            /* H */
  uint32_t dtype;
  float epsilon;              /* of the norm */
  uint64_t part_offset;       /* bytes into every rank's symmetric buffer: part [n, H] */
  const int32_t *permutation; /* [n], or null: the tokens' own order, a plain reduce-scatter */
  const int32_t *offsets;     /* [P + 1], or null: even parts, the first n mod P ranks one more */
  uint64_t capacity;          /* rows that out (and residual_out) have room for */
  void *out;                  /* [capacity, H] */
  const void *residual;       /* [n, H], not null if norm_weight is not */
  const void *norm_weight;    /* [H], or null: no norm */
  void *residual_out;         /* [capacity, H], not null if norm_weight is not */
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
  uint64_t capacity;          /* rows that `rows` has */
  const void *rows;           /* [capacity, H] */
} semmoe_allgather_args;

/* out = sum over ranks q of part_q, on every rank. part and out may be the same place. */
typedef struct semmoe_all_reduce_args {
  uint64_t struct_bytes;
  uint64_t tokens;      /* n */
  uint64_t hidden;      /* H */
  uint32_t dtype;
  uint32_t reserved;
  uint64_t part_offset; /* bytes into every rank's symmetric buffer: part [n, H] */
  uint64_t out_offset;  /* bytes into every rank's symmetric buffer: out [n, H] */
} semmoe_all_reduce_args;

/* Every token goes once to each rank that hosts one of its experts, the own rank included. n may differ between ranks, all else is the
 * same. Received rows are packed by source rank, then in the order of the source's tokens; R = received rows, at most `capacity`. */
typedef struct semmoe_dispatch_args {
  uint64_t struct_bytes;
  uint64_t tokens;               /* n of this rank */
  uint64_t hidden;               /* H */
  uint32_t dtype;
  uint32_t top_k;                /* k, 1 to 64 */
  uint64_t experts_total;        /* N */
  uint64_t capacity;             /* rows that the receiving arrays have room for */
  const int32_t *rank_of_expert; /* [N], each in 0..P-1, the same on all ranks */
  const void *x;                 /* [n, H] */
  const int32_t *experts;        /* [n, k], each in 0..N-1 or SEMMOE_NONE; one token's are distinct */
  const float *weights;          /* [n, k] */
  uint64_t rows_offset;          /* into the symmetric buffer, received: [capacity, H] of dtype */
  uint64_t tokens_offset;        /* received: [capacity] int32, the token's index on its source */
  uint64_t experts_offset;       /* received: [capacity, k] int32, the experts that are here, then SEMMOE_NONE */
  uint64_t weights_offset;       /* received: [capacity, k] float, their weights, then 0 */
  int32_t *source_offsets;       /* [P + 1] out: rows from rank p are source_offsets[p] .. source_offsets[p + 1] - 1 */
  int32_t *sent_rows;            /* [n, P] out: the row of rank q that token t became, or SEMMOE_NONE; combine needs it */
} semmoe_dispatch_args;

/* out[t] = sum over ranks q of sums_q[sent_rows[t, q]], over the ranks that t was sent to, in f32 in rank order, rounded once; zeros if
 * there is none. sums_q[i] is what rank q made of its received row i: the sum of weight x expert over the row's experts there. */
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

/* One address that stands for the symmetric buffers of all ranks (NVLink SHARP): a multicast object of their GPUs, to which every rank
 * bound its buffer from its first byte, mapped here. From then on the calls of `operations` go through the switch, but for the fused
 * norm and for rows that are no multiple of 16 bytes, which go to the peers as before. The switch adds in an order of its own: a
 * reduce-scatter is then equal up to rounding only; an allgather has the same bits. All ranks do the same, between the same calls (else
 * SEMMOE_DISAGREE). */
typedef struct semmoe_multicast_args {
  uint64_t struct_bytes;
  void *address;       /* null with operations 0: no longer */
  uint64_t bytes;      /* behind the address, at least buffer_bytes */
  uint32_t operations; /* SEMMOE_MULTICAST_*, or 0 */
  uint32_t reserved;
} semmoe_multicast_args;

/* SEMMOE_ABI_VERSION of the library; compare before anything else. */
uint32_t semmoe_abi_version(void);

/* 1 if the library was built with CUDA and kernels for it and finds a driver, else 0. */
int32_t semmoe_has_cuda(void);

/* One sentence about the calling thread's last status above 0, valid until its next call; never null. */
const char *semmoe_last_error(void);

/* Bytes of signals that one rank needs, for any number of tokens. */
int32_t semmoe_signal_bytes(uint32_t device, uint32_t world, uint64_t *bytes);

/* Makes this rank's end of a group. Buffers and signals stay the caller's, and stay mapped until the last rank called semmoe_free.
 * Does not wait for the other ranks. */
int32_t semmoe_init(const semmoe_init_args *args, semmoe_comm **comm);

/* Ends it; on the CPU peers that wait for this rank fail at once, with CUDA at their timeout. With CUDA all launched work has ended
 * before. Null is allowed. */
void semmoe_free(semmoe_comm *comm);

/* What went wrong behind the host's back: SEMMOE_OK, or why a kernel stopped (CUDA). Does not wait. */
int32_t semmoe_check(semmoe_comm *comm);

/* 1 if the communicator's GPU can take part in a multicast object, else 0. */
int32_t semmoe_has_multicast(semmoe_comm *comm);

/* Lets calls go through the switch, or stops it; launches nothing. SEMMOE_DEVICE where semmoe_has_multicast is 0. */
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
