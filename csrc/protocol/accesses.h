// Accesses to the memory that ranks share: one table for kernels, models and machine code.
//
//   gpu/cuda/memory.cuh            builds its instructions across the link from the verbs
//   tests/cuda_accesses_test.cpp   compares each kernel thread's accesses with the rows, in order,
//                                  also after a failure
//   tests/cpu_accesses_test.cpp    does the same for csrc/cpu
//   tests/native/protocol_model/   checks the protocol that the rows define under memory models
//   tests/native/sass/, amd/       count the verbs in the machine code
//
// The last ones read this file line by line: write one row or verb per line.
#pragma once

// clang-format off

// ---- CUDA: verbs, as PTX spells them ------------------------------------------------------------

//                             operation       order        type
#define ALLNORM_STORE_PACK     (st,            relaxed.sys, v4.u32)
#define ALLNORM_LOAD_PACK      (ld,            relaxed.sys, v4.u32)
#define ALLNORM_STORE_U64      (st,            relaxed.sys, u64)
#define ALLNORM_LOAD_U64       (ld,            relaxed.sys, u64)
#define ALLNORM_STORE_U32      (st,            relaxed.sys, u32)
#define ALLNORM_LOAD_U32       (ld,            relaxed.sys, u32)
#define ALLNORM_ACQUIRE_U32    (ld,            acquire.sys, u32)
#define ALLNORM_CLEAR_PACK     (st,            weak,        v4.u32)
#define ALLNORM_CLEAR_U64      (st,            weak,        u64)
#define ALLNORM_CLEAR_U32      (st,            weak,        u32)
#define ALLNORM_FENCE          (fence,         acq_rel.sys, none)
#define ALLNORM_GRID_WAIT      (griddepcontrol, wait,       none)
#define ALLNORM_BLOCK_BARRIER  (barrier,       cta,         none)

// A verb's PTX instruction, without operands.
#define ALLNORM_PTX(verb) ALLNORM_PTX_OF verb
#define ALLNORM_PTX_OF(operation, order, type) #operation "." #order ".global." #type
#define ALLNORM_PTX_FENCE(verb) ALLNORM_PTX_FENCE_OF verb
#define ALLNORM_PTX_FENCE_OF(operation, order, type) #operation "." #order

// part      the role of a thread. Lanes of the service cluster, one per peer, do `roll_call` or
//           `hand_back` (return slots). Every block of a large operation starts with `head`. Every
//           thread of a row does `send`. The threads that sum do `own` (in one_shot: all), and the
//           others do `receive`. `sums` is the exchange of sums of squares in rms_norm_sharded, by
//           the first warp of each block. For rows with owners, `owners` is the exchange of partials. After
//           it, `rows` are sums or rows of the dtype of x, and `packed` are rows in their format.
// place     the memory: in this rank's workspace for loads and clears, otherwise in a peer's
// number    the value that is stored or waited for: the operation (op), the last operation before
//           it that returned slots (last), the tag, or a payload
// when      large: in large operations. hands_back: in operations that return slots, on ranks that
//           have not failed. unless_failed: unless one of the thread's waits failed in this
//           operation or before. unless_failed_before: unless an earlier operation has failed.
//           Only threads that have not failed load.
// partner   the peer's part that reads the value stored here, or stores the value read here
#define ALLNORM_ACCESSES(ACCESS) \
  /*     part             place     verb           number   when                  partner          */ \
  ACCESS(begin,           none,     GRID_WAIT,     none,    always,               none             ) \
  ACCESS(head,            released, ACQUIRE_U32,   last,    large,                hand_back        ) \
  ACCESS(head,            none,     BLOCK_BARRIER, none,    large,                none             ) \
  ACCESS(roll_call,       tag0,     STORE_U64,     tag,     unless_failed_before, roll_call        ) \
  ACCESS(roll_call,       tag1,     STORE_U64,     tag,     unless_failed_before, roll_call        ) \
  ACCESS(roll_call,       tag0,     LOAD_U64,      tag,     always,               roll_call        ) \
  ACCESS(roll_call,       tag1,     LOAD_U64,      tag,     always,               roll_call        ) \
  ACCESS(hand_back,       none,     FENCE,         none,    hands_back,           hand_back        ) \
  ACCESS(hand_back,       released, STORE_U32,     op,      hands_back,           hand_back        ) \
  ACCESS(hand_back,       released, ACQUIRE_U32,   last,    always,               hand_back        ) \
  ACCESS(one_shot_send,   partial,  STORE_PACK,    payload, unless_failed,        one_shot_own     ) \
  ACCESS(one_shot_own,    partial,  LOAD_PACK,     payload, always,               one_shot_send    ) \
  ACCESS(one_shot_own,    partial,  CLEAR_PACK,    none,    always,               one_shot_send    ) \
  ACCESS(sums_send,       partial,  STORE_U32,     payload, unless_failed,        sums_own         ) \
  ACCESS(sums_own,        partial,  LOAD_PACK,     payload, always,               sums_send        ) \
  ACCESS(sums_own,        partial,  CLEAR_PACK,    none,    always,               sums_send        ) \
  ACCESS(two_shot_send,   partial,  STORE_PACK,    payload, unless_failed,        two_shot_own     ) \
  ACCESS(two_shot_own,    partial,  LOAD_PACK,     payload, always,               two_shot_send    ) \
  ACCESS(two_shot_own,    finished, STORE_PACK,    payload, unless_failed_before, two_shot_receive ) \
  ACCESS(two_shot_own,    partial,  CLEAR_PACK,    none,    unless_failed_before, two_shot_send    ) \
  ACCESS(two_shot_receive, finished, LOAD_PACK,    payload, always,               two_shot_own     ) \
  ACCESS(two_shot_receive, finished, CLEAR_PACK,   none,    always,               two_shot_own     ) \
  ACCESS(owners_send,     partial,  STORE_PACK,    payload, unless_failed,        owners_own       ) \
  ACCESS(owners_own,      partial,  LOAD_PACK,     payload, always,               owners_send      ) \
  ACCESS(owners_own,      partial,  CLEAR_PACK,    none,    always,               owners_send      ) \
  ACCESS(rows_own,        finished, STORE_PACK,    payload, unless_failed_before, rows_receive     ) \
  ACCESS(rows_receive,    finished, LOAD_PACK,     payload, always,               rows_own         ) \
  ACCESS(rows_receive,    finished, CLEAR_PACK,    none,    always,               rows_own         ) \
  ACCESS(packed_own,      finished, STORE_U64,     payload, unless_failed_before, packed_receive   ) \
  ACCESS(packed_own,      scale,    STORE_U32,     payload, unless_failed_before, packed_receive   ) \
  ACCESS(packed_receive,  finished, LOAD_U64,      payload, always,               packed_own       ) \
  ACCESS(packed_receive,  finished, CLEAR_U64,     none,    always,               packed_own       ) \
  ACCESS(packed_receive,  scale,    LOAD_U32,      payload, always,               packed_own       ) \
  ACCESS(packed_receive,  scale,    CLEAR_U32,     none,    always,               packed_own       ) \
  ACCESS(probe,           probe,    STORE_U32,     probe,   always,               none             )

// Each part is a function in cpu/comm.cpp. The number after `publish`, `wait` and `read` is a step
// of the operation. Rows are plain memory. A rank publishes and announces in its own workspace, and
// waits and compares in a peer's.
#define ALLNORM_CPU_ACCESSES(ACCESS) \
  /*     part       place      order    partner  */ \
  ACCESS(announce,  tag,       relaxed, compare ) \
  ACCESS(publish,   published, seq_cst, wait    ) \
  ACCESS(publish,   sleepers,  seq_cst, sleep   ) \
  ACCESS(wait,      published, acquire, publish ) \
  ACCESS(compare,   tag,       relaxed, announce) \
  ACCESS(sleep,     sleepers,  seq_cst, publish ) \
  ACCESS(sleep,     published, seq_cst, publish )

// The steps of each algorithm for one chunk, in order.
#define ALLNORM_CPU_ALGORITHMS(DO) \
  DO(one_shot,   announce) \
  DO(one_shot,   write_partial) \
  DO(one_shot,   publish_1) \
  DO(one_shot,   wait_1) \
  DO(one_shot,   read_partial) \
  DO(two_shot,   announce) \
  DO(two_shot,   write_partial) \
  DO(two_shot,   publish_1) \
  DO(two_shot,   wait_1) \
  DO(two_shot,   read_partial) \
  DO(two_shot,   write_sum) \
  DO(two_shot,   publish_2) \
  DO(two_shot,   wait_2) \
  DO(two_shot,   read_sum) \
  DO(all_gather, announce) \
  DO(all_gather, write_partial) \
  DO(all_gather, publish_1) \
  DO(all_gather, wait_1) \
  DO(all_gather, read_partial)

// clang-format on
